"""The report's plots, as plotly's plain figures: {"data": [...], "layout": {...}}.

Each is a `Figure` with a sentence for those who cannot see it. Colours of text and grid are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from kinroute.replay.arguments import OPTIMUM
from kinroute.replay.palette import DASHES, GREY, MARKERS, POLICY_COLOURS, RED, Figure
from kinroute.replay.rows import Row
from kinroute.replay.table import short
from kinroute.replay.windows import Window

CAPACITY = "capacity of the device, blocks"
PLACED = "LRU's points under the ceiling"
EDGE = 1.15
"""By so much a plot over capacity is wider than the capacities."""


def hit_ratios(rows: Sequence[Row]) -> Figure:
    """Over capacity, of one gap, number of lanes and order; a line goes through the means of seeds."""
    data: list[dict[str, Any]] = []
    ceiling = _by_place(rows, lambda row: 100 * row.ceiling_hit_ratio)
    for policy in _policies(rows):
        own = [row for row in rows if row.policy == policy]
        line = _by_place(own, lambda row: 100 * row.block_hit_ratio)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": _called(policy),
                "x": [x for x, _ in line],
                "y": [y for _, y in line],
                "line": {"color": POLICY_COLOURS[policy], "dash": DASHES.get(policy, "solid")},
                "marker": {"symbol": MARKERS[policy], "size": 8},
                "hovertemplate": "%{x:,.0f} blocks: %{y:.2f} %",
            }
        )
        if len({row.load.seed for row in own}) > 1:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{policy}, each seed",
                    "showlegend": False,
                    "x": [row.capacity_blocks for row in own],
                    "y": [100 * row.block_hit_ratio for row in own],
                    "text": [f"seed {row.load.seed}" for row in own],
                    "marker": {"color": POLICY_COLOURS[policy], "size": 4, "opacity": 0.6},
                    "hovertemplate": "%{text}, %{x:,.0f} blocks: %{y:.2f} %",
                }
            )
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "ceiling (a cache without end)",
            "x": [
                min(row.capacity_blocks for row in rows) / EDGE,
                *(x for x, _ in ceiling),
                max(row.capacity_blocks for row in rows) * EDGE,
            ],
            "y": [ceiling[0][1], *(y for _, y in ceiling), ceiling[-1][1]],
            "line": {"color": RED, "dash": "dot"},
            "hovertemplate": "ceiling: %{y:.2f} %",
        }
    )
    last = _by_place([row for row in rows if row.policy == "lru"], lambda row: 100 * row.block_hit_ratio)
    says = "Block hit ratio over capacity, one line for each policy, and the ceiling."
    if last:
        says += f" LRU goes from {last[0][1]:.2f} to {last[-1][1]:.2f} percent; the ceiling is {ceiling[-1][1]:.2f}."
    return Figure(
        "Hit ratio against capacity",
        says,
        data,
        {
            "xaxis": _capacities([x for x, _ in ceiling], rows),
            "yaxis": {"title": {"text": "block hit ratio, %"}},
            "height": 420,
        },
    )


def gaps_closed(rows: Sequence[Row]) -> Figure:
    """How much of what separates LRU from the optimum each policy closes: means of seeds, whiskers to their ends."""
    data: list[dict[str, Any]] = []
    spoken: list[str] = []
    for policy in _policies(rows):
        if policy in ("lru", OPTIMUM):
            continue
        own = [row for row in rows if row.policy == policy]
        places = _places(own)
        means: list[float | None] = []
        above: list[float] = []
        below: list[float] = []
        for group in places.values():
            shares = [100 * row.gap_closed for row in group if row.gap_closed is not None]
            mean = fmean(shares) if shares else None
            means.append(mean)
            above.append(0.0 if mean is None else max(shares) - mean)
            below.append(0.0 if mean is None else mean - min(shares))
        data.append(
            {
                "type": "bar",
                "name": policy,
                "x": list(places),
                "y": means,
                "marker": {"color": POLICY_COLOURS[policy]},
                "error_y": {
                    "type": "data",
                    "color": GREY,
                    "array": above,
                    "arrayminus": below,
                    "visible": any(above) or any(below),
                },
                "hovertemplate": "%{y:.1f} % of the gap",
            }
        )
        spoken.append(f"{policy} {', '.join('nothing' if mean is None else f'{mean:.0f}' for mean in means)} percent")
    return Figure(
        "Gap closed",
        "Share of the gap between LRU and the optimum that each policy closes, capacity by capacity: "
        + "; ".join(spoken)
        + ".",
        data,
        {
            "xaxis": {"type": "category", "title": {"text": PLACED if rows and rows[0].placed else CAPACITY}},
            "yaxis": {"title": {"text": "gap closed, %"}, "zeroline": True},
            "barmode": "group",
            "bargap": 0.3 if rows and len(_places(rows)) > 1 else 0.7,
            "showlegend": True,
            "height": 420,
        },
    )


def first_tokens(rows: Sequence[Row]) -> Figure:
    """The closed loop: how long callers wait for their first token, over capacity; a line goes through means."""
    data: list[dict[str, Any]] = []
    for policy in _policies(rows):
        own = [row for row in rows if row.policy == policy and row.result is not None and row.result.service]
        for name, dash in (("p50", "dot"), ("p99", "solid")):
            line = _by_place(own, lambda row, name=name: getattr(row.result.service, f"ttft_{name}_s"))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{policy} {name}",
                    "x": [x for x, _ in line],
                    "y": [y for _, y in line],
                    "line": {"color": POLICY_COLOURS[policy], "dash": dash},
                    "marker": {"symbol": MARKERS[policy], "size": 8},
                    "hovertemplate": f"{policy} {name}, %{{x:,.0f}} blocks: %{{y:.3f}} s",
                }
            )
    return Figure(
        "Time to the first token",
        "Seconds from a request's arrival to its first token: the median and the 99th percentile.",
        data,
        {
            "xaxis": _capacities([x for x, _ in _by_place(rows, lambda row: 0.0)], rows),
            "yaxis": {"title": {"text": "seconds"}, "type": "log", "dtick": 1},
            "height": 420,
        },
    )


def by_windows(windows: Sequence[Window]) -> Figure:
    """Of a recording: hit ratio of LRU, and of the optimum that begins each window with LRU's cache."""
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [window.first for window in windows],
            "y": [100 * getattr(window, hits) / max(1, window.prompt_blocks) for window in windows],
            "line": {"color": POLICY_COLOURS[policy], "dash": DASHES.get(policy, "solid")},
            "marker": {"symbol": MARKERS[policy], "size": 7},
            "hovertemplate": "from request %{x:,.0f}: %{y:.2f} %",
        }
        for policy, name, hits in (("lru", "lru", "lru_hits"), (OPTIMUM, "optimum of the window", "optimum_hits"))
    ]
    return Figure(
        "The optimum by windows",
        f"Block hit ratio of LRU in each of {len(windows)} windows, and of the optimum that begins it with LRU's cache "
        "and knows no more of the future than the window.",
        data,
        {
            "xaxis": {"title": {"text": "request"}, "tickformat": ",.0f"},
            "yaxis": {"title": {"text": "block hit ratio, %"}},
            "height": 360,
        },
    )


def tails(rows: Sequence[Row]) -> Figure:
    """Uncached tokens a request, of one place: median, p99 and worst, by kind of conversation."""
    data: list[dict[str, Any]] = []
    spoken: list[str] = []
    for row in rows:
        if row.result is None:
            continue
        kinds = row.result.tails
        for figure, symbol in (("p50", "circle"), ("p99", "diamond"), ("worst", "x")):
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{row.policy} {figure}",
                    "x": [f"{kind} ({tail.requests:,})" for kind, tail in kinds.items()],
                    "y": [max(1, getattr(tail, figure)) for tail in kinds.values()],
                    "offsetgroup": row.policy,
                    "marker": {"color": POLICY_COLOURS[row.policy], "symbol": symbol, "size": 10},
                    "hovertemplate": f"{row.policy}, {figure}: %{{y:,}} tokens",
                }
            )
        if "all" in kinds:
            spoken.append(f"{row.policy} {kinds['all'].p99:,} at p99 and {kinds['all'].worst:,} at worst")
    return Figure(
        "Tails",
        "Prompt tokens that one request had to compute: " + "; ".join(spoken) + ".",
        data,
        {
            "xaxis": {"type": "category", "title": {"text": "kind of conversation (requests)"}},
            "yaxis": {"type": "log", "title": {"text": "uncached tokens"}, "dtick": 1},
            "scattermode": "group",
            "height": 420,
        },
    )


def _policies(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.policy for row in rows))


def _called(policy: str) -> str:
    return f"{policy} (upper bound)" if policy == OPTIMUM else policy


def _places(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By LRU's points under the ceiling where these chose the capacity, else by capacity; in the order of the rows."""
    places: dict[str, list[Row]] = {}
    for row in rows:
        name = f"{row.points_below_ceiling:.3g}" if row.placed else f"{row.capacity_blocks:,}"
        places.setdefault(name, []).append(row)
    return places


def _by_place(rows: Iterable[Row], value: Any) -> list[tuple[float, float]]:
    """(mean capacity, mean value) of each place, by capacity."""
    places = _places(rows).values()
    return sorted((fmean([row.capacity_blocks for row in own]), fmean([value(row) for row in own])) for own in places)


def _capacities(ticks: Sequence[float], rows: Sequence[Row]) -> dict[str, Any]:
    """An axis with a tick at each place."""
    blocks = [row.capacity_blocks for row in rows]
    return {
        "title": {"text": CAPACITY},
        "type": "log",
        "range": [math.log10(min(blocks) / EDGE), math.log10(max(blocks) * EDGE)],
        "tickvals": list(ticks),
        "ticktext": [short(tick) for tick in ticks],
    }
