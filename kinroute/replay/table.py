"""What `kinroute replay` shows on a terminal: one table for each capacity, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kinroute.replay.arguments import OPTIMUM
from kinroute.replay.rows import Place, Row, Summary
from kinroute.replay.windows import Window

NOTHING = "–"
LEGEND = (
    "optimum: an upper bound, by a clairvoyant that evicts leaves first.",
    "regretted: blocks asked for again that LRU would still have had.",
    "LRU needs: how much more cache it takes LRU to have as many hits.",
)


def show(console: Console, rows: Sequence[Row], summaries: Sequence[Summary], block_tokens: int) -> None:
    """Rows of one seed as they are; of several seeds, the mean and the worst of each policy."""
    own = [one for one in summaries if one.order in {row.order for row in rows}]
    for table in _of_seeds(rows, own, block_tokens) if own else _of_one_seed(rows, block_tokens):
        console.print(table)
        console.print()
    served: dict[str, list[Row]] = {}
    for row in rows:
        if row.result is not None and row.result.service is not None:
            place = f"{row.load.name}, {row.order}, {row.capacity_blocks:,} blocks"
            served.setdefault(place, []).append(row)
    for name, group in served.items():
        console.print(_services(name, group))
        console.print()
    for line in LEGEND if not served else ():
        console.print(line, style="dim", highlight=False)


def _of_one_seed(rows: Sequence[Row], block_tokens: int) -> Iterator[Table]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.load, row.order, row.capacity_blocks), []).append(row)
    for group in groups.values():
        first = group[0]
        table = _table(
            first.load.name,
            first.order,
            f"{first.capacity_blocks:,} blocks of {block_tokens} tokens",
            first.lru_points_below_ceiling,
        )
        for row in group:
            _add(table, row.policy, row.policy, row.figures)
        table.caption = "\n".join([*_tails(group), *_moves(group), *_crowd(group)]) or None
        yield table


def _of_seeds(rows: Sequence[Row], summaries: Sequence[Summary], block_tokens: int) -> Iterator[Table]:
    groups: dict[tuple[object, ...], list[Summary]] = {}
    for one in summaries:
        groups.setdefault(one.place, []).append(one)
    for place, group in groups.items():
        first = group[0]
        lru = next((one for one in group if one.policy == "lru"), None)
        table = _table(
            f"{first.shape}, {len(first.seeds)} seeds",
            first.order,
            f"about {first.capacity_blocks:,.0f} blocks of {block_tokens} tokens",
            None if lru is None else lru.mean["points_below"],
        )
        for one in group:
            _add(table, one.policy, one.policy, one.mean)
            _add(table, one.policy, "   worst", one.worst)
        table.caption = "\n".join(_crowd([row for row in rows if row.place == place])) or None
        yield table


def _crowd(rows: Sequence[Row]) -> list[str]:
    """What kept requests from running as they were recorded; a small cache is full of what runs."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        if row.result is not None:
            own = counts.setdefault(row.policy, [0, 0])
            own[0] += row.result.refused
            own[1] += row.result.suspensions
    told = [f"{policy} {refused}/{waits}" for policy, (refused, waits) in counts.items() if refused or waits]
    return [f"crowded (larger than the device/made way for others): {', '.join(told)}"] if told else []


def _tails(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for name, of in (("all", "one request"), ("session", "one session")):
        told = [
            f"{row.policy} {_slashed(tail.p50, tail.p99, tail.worst)}"
            for row in rows
            if row.result is not None and (tail := row.result.tails.get(name)) is not None
        ]
        if told:
            lines.append(f"uncached tokens of {of}, p50/p99/worst: {', '.join(told)}")
    return lines


def _moves(rows: Sequence[Row]) -> list[str]:
    """Between tiers, where there are some."""
    told = [
        f"{row.policy} {_slashed(down, up)}"
        for row in rows
        if row.result is not None
        for down, up in [(sum(row.result.offloaded_blocks.values()), sum(row.result.onboarded_blocks.values()))]
        if down or up
    ]
    return [f"offloaded/onboarded: {', '.join(told)}"] if told else []


def _table(load: str, order: str | None, capacity: str, points: float | None) -> Table:
    where = "" if points is None else f"; LRU is {points:.2f} points under the ceiling"
    title = f"{load}{'' if order is None else f', {order}'}\n{capacity}{where}"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.caption_justify, table.caption_style = "left", "dim"
    table.add_column("policy", no_wrap=True)
    for head in (
        "hit\nratio",
        "under\nceiling",
        "uncached\ntokens",
        "against\nlru",
        "gap\nclosed",
        "demoted/\nregretted",
        "LRU\nneeds",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _add(table: Table, policy: str, name: str, figures: Mapping[str, float | None]) -> None:
    is_end = policy in ("lru", OPTIMUM)
    demoted, regretted = figures["demoted_blocks"], figures["regretted_blocks"]
    table.add_row(
        name,
        percent(figures["block_hit_ratio"]),
        NOTHING if figures["points_below"] is None else f"{figures['points_below']:.2f}",
        short(figures["uncached_tokens"]),
        NOTHING if policy == "lru" else change(figures["uncached_vs_lru"]),
        NOTHING if is_end else percent(figures["gap_closed"], digits=1),
        NOTHING if demoted is None else _slashed(demoted, regretted),
        NOTHING if is_end else more(figures["extra_memory"]),
        style="dim" if policy == OPTIMUM else None,
    )


def _services(name: str, rows: Sequence[Row]) -> Table:
    """The closed loop: what callers waited, and what the worker gave."""
    table = Table(
        title=f"closed loop, {name}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for head in (
        "TTFT\np50",
        "against\nlru",
        "TTFT\np99",
        "against\nlru",
        "run",
        "tokens\n/s",
        "against\nlru",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*served_cells(row))
    return table


def served_cells(row: Row) -> tuple[str, ...]:
    """Policy, TTFT p50, p99, how long the run took, tokens a second; each but that against LRU. Of the closed loop."""
    assert row.result is not None
    assert row.result.service is not None
    service, against = row.result.service, {} if row.policy == "lru" else row.service_vs_lru or {}
    return (
        row.policy,
        seconds(service.ttft_p50_s),
        change(against.get("ttft_p50_s")),
        seconds(service.ttft_p99_s),
        change(against.get("ttft_p99_s")),
        seconds(service.makespan_s),
        short(service.output_tokens_per_s),
        change(against.get("output_tokens_per_s")),
    )


def seconds(time_s: float) -> str:
    """0.0123 s is 12 ms, and hours are seconds too."""
    return f"{1000 * time_s:,.0f} ms" if time_s < 1 else f"{time_s:,.1f} s" if time_s < 1000 else f"{time_s:,.0f} s"


def by_windows(place: Place, windows: Sequence[Window]) -> str:
    """What there was to gain at any time, in a line."""
    blocks = sum(window.prompt_blocks for window in windows)
    lru, best = (sum(getattr(one, name) for one in windows) for name in ("lru_hits", "optimum_hits"))
    most = max(windows, key=lambda one: (one.optimum_hits - one.lru_hits) / max(1, one.prompt_blocks))
    return (
        f"{place.capacity_blocks:,} blocks, windows of {windows[0].requests:,} requests, each from LRU's cache: LRU "
        f"{percent(lru / max(1, blocks))}, optimum {percent(best / max(1, blocks))}; most to gain from request "
        f"{most.first:,} on: {percent((most.optimum_hits - most.lru_hits) / max(1, most.prompt_blocks))}."
    )


def _slashed(*counts: float | None) -> str:
    return "/".join(map(short, counts)).replace(" ", "")


def percent(share: float | None, digits: int = 2) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def change(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:+.1f} %".replace("-0.0 %", "+0.0 %")


def more(share: float | None) -> str:
    """+50.0 %, and from twice on ×2.3."""
    return change(share) if share is None or share < 1 else f"×{1 + share:,.1f}"


def short(count: float | None) -> str:
    """12345678 is 12.3 M."""
    if count is None:
        return NOTHING
    for unit, least, each in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if abs(count) >= least:
            size = abs(count) / each
            return f"{count / each:.{2 if size < 10 else 1 if size < 100 else 0}f} {unit}"
    return f"{count:,.0f}"
