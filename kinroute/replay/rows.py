"""One row for each run: what it came to, against LRU, against the optimum and against a cache without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from kinroute.replay.arguments import OPTIMUM
from kinroute.replay.loads import Load
from kinroute.replay.optimum import Bound
from kinroute.replay.results import RunResult, Service
from kinroute.replay.windows import Window

PLAYED = ("gap_s", "lanes", "seed")
SERVED = ("ttft_p50_s", "ttft_p99_s", "ttft_mean_s", "makespan_s", "output_tokens_per_s", "requests_per_s")
RESULTS = tuple(field.name for field in fields(RunResult))


@dataclass(frozen=True, slots=True)
class Place:
    """A capacity of the device, and how many points of hit ratio under the ceiling LRU was to sit there; None where
    the capacity was given."""

    capacity_blocks: int
    points: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was found at one place of one load. `arms`: by policy, LRU among them, those that did not fail.

    `role`, `hints`: as every arm has them. `tiers`: blocks of each, warm to cold.
    `windows`: the optimum by windows, of a recording.
    `lru_needs`: for a policy how many blocks LRU needs for as many hits; None: no cache is enough.
    `order`: of the arms, in the closed loop, where they run in both.
    """

    load: Load
    place: Place
    role: str
    hints: str
    tiers: Mapping[str, int]
    ceiling: Bound
    block_tokens: int
    arms: Mapping[str, RunResult]
    optimum: Bound | None
    windows: tuple[Window, ...]
    lru_needs: Mapping[str, int | None]
    order: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`placed`: whether the capacity was placed by LRU's distance from the ceiling. `points_below_ceiling`: where LRU
    was to sit, or sits where the capacity was given; `points_below` is this run's own. Ratios are
    shares of 1; differences to LRU are None where it failed, `gap_closed` also where LRU is optimal.

    `lru_needs_blocks`: how much cache, of all tiers together, LRU needs for as many hits; None: no cache is enough, or
    unknown. `extra_memory`: how much more that is, as a share. `service_vs_lru`: how much more of each of `SERVED` the
    closed loop has than under LRU, as a share.
    """

    policy: str
    upper_bound: bool
    role: str
    hints: str
    tiers: Mapping[str, int]
    load: Load
    order: str | None
    capacity_blocks: int
    placed: bool
    points_below_ceiling: float | None
    lru_points_below_ceiling: float | None
    points_below: float
    ceiling_hit_ratio: float
    prompt_blocks: int
    hit_blocks: int
    block_hit_ratio: float
    uncached_tokens: int
    hit_ratio_vs_lru: float | None
    uncached_vs_lru: float | None
    gap_closed: float | None
    service_vs_lru: Mapping[str, float] | None
    lru_needs_blocks: int | None
    extra_memory: float | None
    result: RunResult | None

    @property
    def place(self) -> tuple[object, ...]:
        """What several seeds have in common."""
        where = self.points_below_ceiling if self.placed else self.capacity_blocks
        return self.load.shape, self.order, where

    @property
    def demoted_blocks(self) -> int | None:
        return None if self.result is None else self.result.demoted_blocks

    @property
    def regretted_blocks(self) -> int | None:
        return None if self.result is None else self.result.regretted_blocks

    @property
    def figures(self) -> dict[str, float | None]:
        """Those of which several seeds have a mean."""
        service = None if self.result is None else self.result.service
        return {name: getattr(service if name in SERVED else self, name, None) for name in HIGHER_IS_BETTER}

    def told(self) -> dict[str, Any]:
        """As JSON shows it, what the arm told of itself included: of the optimum, which has no arm, that is null."""
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("load", "result")}
        own |= {name: getattr(self.load, name) for name in PLAYED}
        inside = dict.fromkeys(RESULTS) if self.result is None else asdict(self.result)
        return {**own, **{name: value for name, value in inside.items() if name not in own}}


def rows_of(outcome: Outcome) -> Iterator[Row]:
    """LRU first, the optimum last."""
    lru = outcome.arms.get("lru")
    for policy, result in outcome.arms.items():
        yield _row(outcome, policy, result.hit_blocks, result.prompt_blocks, result.uncached_tokens, result)
    bound = outcome.optimum
    if bound is not None and lru is not None:
        saved = (bound.hit_blocks - lru.hit_blocks) * outcome.block_tokens
        yield _row(outcome, OPTIMUM, bound.hit_blocks, bound.prompt_blocks, lru.uncached_tokens - saved, None)


def _row(
    outcome: Outcome, policy: str, hit_blocks: int, prompt_blocks: int, uncached: int, result: RunResult | None
) -> Row:
    load, place, lru, bound = outcome.load, outcome.place, outcome.arms.get("lru"), outcome.optimum
    ratio, ceiling = (
        _share(hit_blocks, prompt_blocks),
        _share(outcome.ceiling.hit_blocks, outcome.ceiling.prompt_blocks),
    )
    lru_points = None if lru is None else 100 * (ceiling - lru.block_hit_ratio)
    gap_closed = None
    if lru is not None and bound is not None and bound.hit_blocks != lru.hit_blocks:
        gap_closed = (hit_blocks - lru.hit_blocks) / (bound.hit_blocks - lru.hit_blocks)
    needs = outcome.lru_needs.get(policy)
    return Row(
        policy=policy,
        upper_bound=policy == OPTIMUM,
        role=outcome.role,
        hints=outcome.hints,
        tiers=outcome.tiers,
        load=load,
        order=outcome.order,
        capacity_blocks=place.capacity_blocks,
        placed=place.points is not None,
        points_below_ceiling=lru_points if place.points is None else place.points,
        lru_points_below_ceiling=lru_points,
        points_below=100 * (ceiling - ratio),
        ceiling_hit_ratio=ceiling,
        prompt_blocks=prompt_blocks,
        hit_blocks=hit_blocks,
        block_hit_ratio=ratio,
        uncached_tokens=uncached,
        hit_ratio_vs_lru=None if lru is None else ratio - lru.block_hit_ratio,
        uncached_vs_lru=None if lru is None or not lru.uncached_tokens else uncached / lru.uncached_tokens - 1,
        gap_closed=gap_closed,
        service_vs_lru=_against(result, lru),
        lru_needs_blocks=needs,
        extra_memory=None if needs is None else needs / sum(outcome.tiers.values()) - 1,
        result=result,
    )


def first_orders(rows: Sequence[Row]) -> list[Row]:
    """Of arms that ran in several orders those of the first, if all came to the same in each; none otherwise."""
    digests: dict[tuple[object, ...], set[tuple[str, Service | None]]] = {}
    for row in rows:
        if row.result is not None:
            arm = (row.load, row.capacity_blocks, row.policy)
            digests.setdefault(arm, set()).add((row.result.digest, row.result.service))
    if any(len(found) > 1 for found in digests.values()):
        return []
    return [row for row in rows if row.order == rows[0].order]


def _against(result: RunResult | None, lru: RunResult | None) -> dict[str, float] | None:
    if result is None or result.service is None or lru is None or lru.service is None:
        return None
    floors = {name: getattr(lru.service, name) for name in SERVED}
    return {name: getattr(result.service, name) / floor - 1 for name, floor in floors.items() if floor}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy over several seeds: the mean of each figure, and the worst seed's."""

    policy: str
    shape: str
    gap_s: float | None
    lanes: int | None
    order: str | None
    points_below_ceiling: float | None
    capacity_blocks: float
    seeds: tuple[int | None, ...]
    mean: Mapping[str, float | None]
    worst: Mapping[str, float | None]

    @property
    def place(self) -> tuple[object, ...]:
        where = self.capacity_blocks if self.points_below_ceiling is None else self.points_below_ceiling
        return self.shape, self.order, where

    def told(self) -> dict[str, Any]:
        return asdict(self)


HIGHER_IS_BETTER = {
    "block_hit_ratio": True,
    "points_below": False,
    "uncached_tokens": False,
    "hit_ratio_vs_lru": True,
    "uncached_vs_lru": False,
    "gap_closed": True,
    "extra_memory": True,
    "demoted_blocks": False,
    "regretted_blocks": False,
    "ttft_p50_s": False,
    "ttft_p99_s": False,
    "ttft_mean_s": False,
    "makespan_s": False,
    "output_tokens_per_s": True,
    "requests_per_s": True,
}


def summaries_of(rows: Iterable[Row]) -> list[Summary]:
    """Of rows that differ in nothing but the seed, and in the capacity where that was placed for each seed."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*row.place, row.policy), []).append(row)
    return [_summary(group) for group in groups.values()]


def _summary(group: list[Row]) -> Summary:
    mean: dict[str, float | None] = {}
    worst: dict[str, float | None] = {}
    for name, higher_is_better in HIGHER_IS_BETTER.items():
        values = [value for row in group if (value := row.figures[name]) is not None]
        mean[name] = fmean(values) if len(values) == len(group) else None
        worst[name] = (min if higher_is_better else max)(values) if len(values) == len(group) else None
    first = group[0]
    return Summary(
        policy=first.policy,
        shape=first.load.shape,
        gap_s=first.load.gap_s,
        lanes=first.load.lanes,
        order=first.order,
        points_below_ceiling=first.points_below_ceiling if first.placed else None,
        capacity_blocks=fmean([row.capacity_blocks for row in group]),
        seeds=tuple(row.load.seed for row in group),
        mean=mean,
        worst=worst,
    )
