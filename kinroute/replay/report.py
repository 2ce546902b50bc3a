"""The HTML report: one file with everything in it, plotly's script included; it asks no network for anything."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jinja2
import plotly.offline
from markupsafe import Markup

from kinroute.replay.arguments import OPTIMUM
from kinroute.replay.figures import by_windows, first_tokens, gaps_closed, hit_ratios, tails
from kinroute.replay.findings import Findings
from kinroute.replay.inside import family_tree, timeline
from kinroute.replay.palette import Figure
from kinroute.replay.rows import Outcome, Row, Summary
from kinroute.replay.table import NOTHING, change, more, percent, served_cells, short

HEADS = (
    "policy",
    "hit ratio",
    "under ceiling",
    "uncached tokens",
    "against lru",
    "gap closed",
    "demoted",
    "regretted",
    "offloaded",
    "onboarded",
    "LRU needs",
)
SERVED_HEADS = (
    "policy",
    "TTFT p50",
    "against lru",
    "TTFT p99",
    "against lru",
    "run",
    "tokens/s",
    "against lru",
)
MOST_INSIDE = 24
"""Of so many runs the inside is shown; each adds some hundred kilobytes."""


@dataclass(frozen=True, slots=True)
class _Line:
    cells: tuple[str, ...]
    bound: bool


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    lines: list[_Line]


def render(found: Findings) -> str:
    rows = found.shown
    fixed: dict[str, Figure] = {}
    sections = [_section(title, group, fixed) for title, group in _by_load(rows).items()]
    windowed = [outcome for outcome in found.outcomes if outcome.windows]
    if windowed:
        sections.append(_windows(windowed, fixed))
    inside = _inside(rows)
    text = importlib.resources.files("kinroute.replay").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(text).render(
        command=found.command,
        version=found.version,
        traces=found.traces,
        notes=found.notes,
        heads=HEADS,
        places=[*_means(found.shown_summaries), *_places(rows, _cells)],
        served_heads=SERVED_HEADS,
        served=_places(
            [row for row in rows if row.result is not None and row.result.service is not None], served_cells
        ),
        sections=sections,
        inside=[{"id": name, "name": one["name"]} for name, one in inside.items()],
        chosen=_chosen(inside),
        plots=_json({"fixed": {name: asdict(figure) for name, figure in fixed.items()}, "inside": inside}),
        plotly=Markup(plotly.offline.get_plotlyjs()),  # noqa: S704 - the library's own script
    )


def _json(value: object) -> Markup:
    """For a script element: nothing in it can end the element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))  # noqa: S704


def _load(row: Row) -> str:
    order = "" if row.order is None else f", {row.order}"
    return f"{row.load.shape}{order}"


def _seed(row: Row) -> str:
    return "" if row.load.seed is None else f", seed {row.load.seed}"


def _by_load(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_load(row), []).append(row)
    return groups


def _section(title: str, rows: list[Row], fixed: dict[str, Figure]) -> dict[str, Any]:
    """Tails are of the first seed's middle capacity."""
    seeds = [row for row in rows if row.load == rows[0].load]
    capacities = list(dict.fromkeys(row.capacity_blocks for row in seeds))
    middle = capacities[(len(capacities) - 1) // 2]
    is_closed = any(row.result is not None and row.result.service is not None for row in rows)
    figures = [
        hit_ratios(rows),
        first_tokens(rows) if is_closed else gaps_closed(rows),
        tails([row for row in seeds if row.capacity_blocks == middle]),
    ]
    plots = []
    for figure in figures:
        name = f"plot-{len(fixed) + 1}"
        fixed[name] = figure
        shown = figure.title if figure.title != "Tails" else f"Tails at {middle:,} blocks{_seed(rows[0])}"
        plots.append({"id": name, "title": shown, "says": figure.says})
    return {"title": title, "plots": plots}


def _windows(outcomes: Sequence[Outcome], fixed: dict[str, Figure]) -> dict[str, Any]:
    plots = []
    for outcome in outcomes:
        name = f"plot-{len(fixed) + 1}"
        figure = fixed[name] = by_windows(outcome.windows)
        plots.append(
            {"id": name, "title": f"{figure.title}, {outcome.place.capacity_blocks:,} blocks", "says": figure.says}
        )
    return {"title": "What there was to gain", "plots": plots}


def _inside(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    shown: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.result is None or len(shown) == MOST_INSIDE or not (row.result.timeline or row.result.family):
            continue
        shown[f"run-{len(shown) + 1}"] = {
            "name": f"{row.policy}, {row.capacity_blocks:,} blocks, {_load(row)}{_seed(row)}",
            "timeline": asdict(timeline(row.result.timeline)) if row.result.timeline else None,
            "family": asdict(family_tree(row.result.family)) if row.result.family else None,
        }
    return shown


def _chosen(inside: dict[str, dict[str, Any]]) -> str:
    """The last policy at the middle capacity."""
    names = list(inside)
    policies = list(dict.fromkeys(one["name"].partition(",")[0] for one in inside.values()))
    own = [name for name in names if inside[name]["name"].startswith(f"{policies[-1]},")] if names else []
    return own[(len(own) - 1) // 2] if own else ""


def _places(rows: Sequence[Row], cells: Callable[[Row], tuple[str, ...]]) -> list[_Place]:
    places: dict[str, list[_Line]] = {}
    for row in rows:
        where = row.lru_points_below_ceiling
        below = "" if where is None else f"; LRU is {where:.2f} points under the ceiling"
        name = f"{_load(row)}{_seed(row)}: {row.capacity_blocks:,} blocks{below}"
        places.setdefault(name, []).append(_Line(cells(row), row.upper_bound))
    return [_Place(name, lines) for name, lines in places.items()]


def _means(summaries: Sequence[Summary]) -> list[_Place]:
    places: dict[tuple[object, ...], _Place] = {}
    for one in summaries:
        order = "" if one.order is None else f", {one.order}"
        blocks = f"about {one.capacity_blocks:,.0f} blocks"
        name = f"{one.shape}{order}, mean of {len(one.seeds)} seeds: {blocks}"
        place = places.setdefault(one.place, _Place(name, []))
        mean, is_end = one.mean, one.policy in ("lru", OPTIMUM)
        ratio, below = mean["block_hit_ratio"], mean["points_below"]
        cells = (
            one.policy,
            percent(ratio),
            NOTHING if below is None else f"{below:.2f}",
            short(mean["uncached_tokens"]),
            NOTHING if one.policy == "lru" else change(mean["uncached_vs_lru"]),
            NOTHING if is_end else percent(mean["gap_closed"], digits=1),
            short(mean["demoted_blocks"]),
            short(mean["regretted_blocks"]),
            NOTHING,
            NOTHING,
            NOTHING if is_end else more(mean["extra_memory"]),
        )
        place.lines.append(_Line(cells, one.policy == OPTIMUM))
    return list(places.values())


def _cells(row: Row) -> tuple[str, ...]:
    is_end = row.policy in ("lru", OPTIMUM)
    result = row.result
    return (
        row.policy,
        percent(row.block_hit_ratio),
        f"{row.points_below:.2f}",
        short(row.uncached_tokens),
        NOTHING if row.policy == "lru" else change(row.uncached_vs_lru),
        NOTHING if is_end else percent(row.gap_closed, digits=1),
        short(row.demoted_blocks),
        short(row.regretted_blocks),
        NOTHING if result is None else short(sum(result.offloaded_blocks.values())),
        NOTHING if result is None else short(sum(result.onboarded_blocks.values())),
        NOTHING if is_end else more(row.extra_memory),
    )
