"""The report's plots of one run from the inside: what was where, over time and by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinroute.replay.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Figure
from kinroute.replay.results import Family, Member, Sample

RESIDENCY_COLOURS = {
    "device": BLUE,
    "device, demoted": ORANGE,
    "host": GREEN,
    "disk": PURPLE,
    "dropped": GREY,
}
LAYERS = {"held": BLUE, "idle": SKY, "demoted": ORANGE, "moving": PURPLE, "free": "rgba(140,140,140,0.25)"}
ROW_PX = 22


def timeline(samples: Sequence[Sample]) -> Figure:
    """What each tier holds, over simulated time, and below it what was demoted and dropped."""
    tiers = list(samples[0].tiers) if samples else []
    unit, unit_s = ("hours", 3600) if samples and samples[-1].t_s >= 7200 else ("minutes", 60)
    times = [sample.t_s / unit_s for sample in samples]
    panels = len(tiers) + 1
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": 240 * panels,
        "xaxis": {"title": {"text": f"simulated time, {unit}"}, "anchor": f"y{panels if panels > 1 else ''}"},
        "barmode": "group",
    }
    for number, tier in enumerate(tiers, 1):
        axis = "" if number == 1 else str(number)
        layout[f"yaxis{axis}"] = {"title": {"text": f"{tier}, pages", "standoff": 8}, "domain": _domain(number, panels)}
        for layer, colour in LAYERS.items():
            values = [_layer(sample, tier, layer) for sample in samples]
            if not any(values):
                continue
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": layer,
                    "legendgroup": layer,
                    "showlegend": not any(one["name"] == layer for one in data),
                    "stackgroup": tier,
                    "x": times,
                    "y": values,
                    "yaxis": f"y{axis}",
                    "line": {"width": 0.5, "color": colour},
                    "fillcolor": colour,
                    "hovertemplate": f"{layer}: %{{y:,.0f}}",
                }
            )
    layout[f"yaxis{panels if panels > 1 else ''}"] = {
        "title": {"text": "blocks a sample"},
        "domain": _domain(panels, panels),
    }
    for name, colour, counts in (
        ("demoted, each sample", RED, [sample.demoted_blocks for sample in samples]),
        ("dropped, each sample", GREY, [sample.dropped_blocks for sample in samples]),
    ):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": times,
                "y": counts,
                "yaxis": f"y{panels if panels > 1 else ''}",
                "line": {"color": colour, "width": 1.5, "shape": "hv"},
                "hovertemplate": "%{y:,.0f} blocks",
            }
        )
    demoted = sum(sample.demoted_blocks for sample in samples)
    dropped = sum(sample.dropped_blocks for sample in samples)
    return Figure(
        "Tiers and demotions over time",
        f"Pages of each tier over {times[-1] if times else 0:.1f} simulated {unit}; {demoted:,} blocks were demoted "
        f"and {dropped:,} dropped.",
        data,
        layout,
    )


def family_tree(family: Family) -> Figure:
    """Each conversation of a family below its parent, a bar of its own blocks by where they are."""
    ordered = _tree(family.members)
    labels = [_label(member, depth) for member, depth in ordered]
    data: list[dict[str, Any]] = []
    for place, colour in RESIDENCY_COLOURS.items():
        counts = [_resident(member, place) for member, _ in ordered]
        if not any(counts):
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": place,
                "x": counts,
                "y": list(range(len(ordered))),
                "text": [f"{member.conversation} ({member.kind}, {member.state})" for member, _ in ordered],
                "textposition": "none",
                "marker": {"color": colour},
                "hovertemplate": f"%{{text}}: %{{x:,}} blocks {place}",
            }
        )
    total = sum(member.device + member.host + member.disk + member.dropped for member, _ in ordered)
    resident = total - sum(member.dropped for member, _ in ordered)
    return Figure(
        "Family tree of one session",
        f"{len(ordered)} conversations of one session after {family.t_s / 60:,.0f} simulated minutes: {resident:,} of "
        f"{total:,} blocks are still in some tier.",
        data,
        {
            "barmode": "stack",
            "legend": {"traceorder": "normal"},
            "height": 140 + ROW_PX * max(4, len(ordered)),
            "xaxis": {"title": {"text": "blocks of each conversation"}, "tickformat": ",.0f"},
            "yaxis": {
                "tickvals": list(range(len(ordered))),
                "ticktext": labels,
                "autorange": "reversed",
                "automargin": True,
                "ticklabelposition": "outside",
                "showgrid": False,
            },
        },
    )


def _domain(number: int, panels: int) -> list[float]:
    """Of panel `number`, the first on top."""
    each = 1 / panels
    return [round(1 - number * each + (0.05 if number < panels else 0.0), 4), round(1 - (number - 1) * each - 0.02, 4)]


def _layer(sample: Sample, tier: str, layer: str) -> int:
    pages = sample.tiers[tier]
    if layer == "idle":
        return pages.idle - pages.demoted
    count: int = getattr(pages, layer)
    return count


def _tree(members: Sequence[Member]) -> list[tuple[Member, int]]:
    """Depth first, each with its depth; one whose parent is not among them is a root."""
    known = {member.conversation for member in members}
    children: dict[str | None, list[Member]] = {}
    for member in members:
        children.setdefault(member.parent if member.parent in known else None, []).append(member)
    ordered: list[tuple[Member, int]] = []
    waiting = [(member, 0) for member in reversed(children.get(None, []))]
    while waiting:
        member, depth = waiting.pop()
        ordered.append((member, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(member.conversation, []))]
    return ordered


def _label(member: Member, depth: int) -> str:
    name = member.conversation.partition("/")[2] or member.conversation
    shown = name if len(name) <= 24 else name[:23] + "…"
    return "\u00a0" * 4 * (depth - 1) + ("└ " if depth else "") + f"{shown} · {member.state}"


def _resident(member: Member, place: str) -> int:
    counts: Mapping[str, int] = {
        "device": 0 if member.state == "demoted" else member.device,
        "device, demoted": member.device if member.state == "demoted" else 0,
        "host": member.host,
        "disk": member.disk,
        "dropped": member.dropped,
    }
    return counts[place]
