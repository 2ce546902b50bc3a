"""What `kinroute replay` shows on a terminal: one table for each capacity, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kinroute.replay.arguments import OPTIMUM
from kinroute.replay.results import Service
from kinroute.replay.rows import Row, Summary

NOTHING = "–"
LEGEND = (
    "optimum: an upper bound, by a clairvoyant that evicts leaves first.",
    "regretted: blocks asked for again that LRU would still have had.",
    "LRU needs: how much more cache it takes LRU to have as many hits.",
)


def show(console: Console, rows: Sequence[Row], summaries: Sequence[Summary], block_tokens: int) -> None:
    """Rows of one seed as they are; of several seeds, the mean and the worst of each policy."""
    for table in _of_seeds(summaries, block_tokens) if summaries else _of_one_seed(rows, block_tokens):
        console.print(table)
    served = [row for row in rows if row.result is not None and row.result.service is not None]
    if served:
        console.print(_services(served))
    for line in LEGEND:
        console.print(line, style="dim", highlight=False)


def _of_one_seed(rows: Sequence[Row], block_tokens: int) -> Iterator[Table]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.gap_s, row.lanes, row.seed, row.order, row.capacity_blocks), []).append(row)
    for group in groups.values():
        first = group[0]
        table = _table(
            f"gap {first.gap_s:g} s, {first.lanes} lanes, seed {first.seed}",
            first.order,
            f"{first.capacity_blocks:,} blocks of {block_tokens} tokens",
            first.lru_points_below_ceiling,
        )
        for row in group:
            _add(table, row.policy, row.policy, row.figures)
        yield table


def _of_seeds(summaries: Sequence[Summary], block_tokens: int) -> Iterator[Table]:
    groups: dict[tuple[object, ...], list[Summary]] = {}
    for one in summaries:
        where = one.capacity_blocks if one.points_below_ceiling is None else one.points_below_ceiling
        groups.setdefault((one.gap_s, one.lanes, one.order, where), []).append(one)
    for group in groups.values():
        first = group[0]
        table = _table(
            f"gap {first.gap_s:g} s, {first.lanes} lanes, {len(first.seeds)} seeds",
            first.order,
            f"about {first.capacity_blocks:,.0f} blocks of {block_tokens} tokens",
            first.points_below_ceiling,
        )
        for one in group:
            _add(table, one.policy, one.policy, one.mean)
            _add(table, one.policy, "   worst", one.worst)
        yield table


def _table(load: str, order: str | None, capacity: str, points: float | None) -> Table:
    where = "" if points is None else f"; LRU is {points:.2f} points under the ceiling"
    title = f"{load}{'' if order is None else f', {order}'}\n{capacity}{where}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
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
        NOTHING if demoted is None or regretted is None else f"{short(demoted)}/{short(regretted)}",
        NOTHING if is_end else more(figures["extra_memory"]),
        style="dim" if policy == OPTIMUM else None,
    )


def _services(rows: Sequence[Row]) -> Table:
    """The closed loop: what callers waited, and what the worker gave."""
    table = Table(title="closed loop", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("policy", no_wrap=True)
    table.add_column("order", no_wrap=True)
    for head in ("blocks", "TTFT\np50", "TTFT\np99", "against\nlru", "run", "tokens/s", "against\nlru"):
        table.add_column(head, justify="right", no_wrap=True)
    lru = {_place(row): row.result.service for row in rows if row.policy == "lru" and row.result is not None}
    for row in rows:
        assert row.result is not None
        service, floor = row.result.service, lru.get(_place(row))
        assert service is not None
        table.add_row(
            row.policy,
            row.order or NOTHING,
            f"{row.capacity_blocks:,}",
            f"{service.ttft_p50_s:.2f} s",
            f"{service.ttft_p99_s:.2f} s",
            _ratio(service, floor, "ttft_p99_s"),
            f"{service.makespan_s:,.0f} s",
            f"{service.output_tokens_per_s:,.1f}",
            _ratio(service, floor, "output_tokens_per_s"),
        )
    return table


def _place(row: Row) -> tuple[object, ...]:
    return row.gap_s, row.lanes, row.seed, row.order, row.capacity_blocks


def _ratio(service: Service, floor: Service | None, name: str) -> str:
    below = None if floor is None else getattr(floor, name)
    return NOTHING if not below or service is floor else change(getattr(service, name) / below - 1)


def percent(share: float | None, digits: int = 2) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def change(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:+.1f} %"


def more(share: float | None) -> str:
    """+50.0 %, and from ten times on ×12.3."""
    return change(share) if share is None or share < 9 else f"×{1 + share:,.1f}"


def short(count: float | None) -> str:
    """12345678 is 12.3 M."""
    if count is None:
        return NOTHING
    for unit, least, each in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if abs(count) >= least:
            return f"{count / each:.1f} {unit}"
    return f"{count:,.0f}"
