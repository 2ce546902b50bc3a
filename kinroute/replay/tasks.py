"""What the processes of a replay do: place capacities, simulate an arm, bound what any policy could do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kinroute.problem import Problem
from kinroute.replay.arguments import OPTIMUM, Asked, Role
from kinroute.replay.arm import Arm
from kinroute.replay.capacities import lru_needs, place
from kinroute.replay.ceiling import ceiling
from kinroute.replay.loads import Load
from kinroute.replay.optimum import Bound, optimum
from kinroute.replay.results import RunResult
from kinroute.replay.rows import Place
from kinroute.replay.simulation import simulate
from kinroute.replay.windows import Window, windowed

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Surveyed:
    ceiling: Bound
    places: tuple[Place, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Finds the ceiling of a load, and its capacities where they are not given: none twice, if two sets of points lead
    to the same one. Raises Problem where the tiers below the device hold more than LRU may have.

    `colder_blocks`: what the tiers below the device hold; LRU's place is that of all tiers together.
    """

    load: Load
    capacities: tuple[int, ...] | None
    points: tuple[float, ...]
    colder_blocks: int
    role: Role
    warmup: float

    @property
    def name(self) -> str:
        return f"ceiling and capacities, {self.load.name}"

    def run(self, on_progress: Progress) -> Surveyed:
        requests = self.load.played()
        on_progress(0.1)
        found = ceiling(requests, role=self.role, warmup=self.warmup)
        on_progress(0.2)
        if self.capacities is not None:
            places = [Place(blocks, None) for blocks in self.capacities]
        else:
            placed = place(requests, self.points, role=self.role, warmup=self.warmup)
            by_capacity = {one.capacity_blocks: one.points for one in reversed(placed)}
            places = [Place(blocks - self.colder_blocks, by_capacity[blocks]) for blocks in reversed(by_capacity)]
        for one in places:
            if one.capacity_blocks < 1:
                raise Problem(
                    f"LRU is {one.points:g} points under the ceiling with {one.capacity_blocks + self.colder_blocks} "
                    f"blocks, and --tiers hold {self.colder_blocks} already: name --capacity, or smaller tiers"
                )
        return Surveyed(found, tuple(places), requests[0].block_tokens)


@dataclass(frozen=True, slots=True)
class Simulation:
    """`order`: of the arms, in the closed loop."""

    load: Load
    place: Place
    arm: Arm
    order: str | None

    @property
    def name(self) -> str:
        order = "" if self.order is None else f", {self.order}"
        return f"{self.arm.policy}, {self.place.capacity_blocks:,} blocks, {self.load.name}{order}"

    def run(self, on_progress: Progress) -> RunResult:
        requests = self.load.played()
        return simulate(requests, self.arm, lambda done: on_progress(done / len(requests)))


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    load: Load
    place: Place
    colder_blocks: int
    role: Role
    warmup: float

    @property
    def name(self) -> str:
        return f"{OPTIMUM}, {self.place.capacity_blocks:,} blocks, {self.load.name}"

    def run(self, on_progress: Progress) -> Bound:
        total = self.place.capacity_blocks + self.colder_blocks
        return optimum(self.load.played(), total, role=self.role, warmup=self.warmup)


@dataclass(frozen=True, slots=True)
class Windowed:
    """The optimum of each window of so many requests, from the cache that LRU had when it began."""

    load: Load
    place: Place
    colder_blocks: int
    role: Role
    window: int

    @property
    def name(self) -> str:
        return f"{OPTIMUM} by windows, {self.place.capacity_blocks:,} blocks, {self.load.name}"

    def run(self, on_progress: Progress) -> tuple[Window, ...]:
        total = self.place.capacity_blocks + self.colder_blocks
        return tuple(windowed(self.load.played(), total, window=self.window, role=self.role))


@dataclass(frozen=True, slots=True)
class Matching:
    """How many blocks LRU needs for each of these numbers of hits; None where no cache is enough."""

    load: Load
    hits: tuple[int, ...]
    role: Role
    warmup: float

    @property
    def name(self) -> str:
        return f"what LRU needs, {self.load.name}"

    def run(self, on_progress: Progress) -> dict[int, int | None]:
        needs = lru_needs(self.load.played(), self.hits, role=self.role, warmup=self.warmup)
        return dict(zip(self.hits, needs, strict=True))


SweepTask = Survey | Simulation | Clairvoyant | Windowed | Matching


def loads_of(asked: Asked, *, recorded: bool) -> list[Load]:
    """`recorded`: the traces are a worker's recordings, which are played once as they stand."""
    if recorded:
        return [Load(asked.traces, asked.block_tokens, asked.requests, None, None, None)]
    return [
        Load(asked.traces, asked.block_tokens, asked.requests, gap_s, lanes, seed)
        for gap_s in asked.gaps_s
        for lanes in asked.lanes
        for seed in asked.seeds
    ]
