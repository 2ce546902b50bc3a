"""What one call of the command has to do, and what was found: fed with results, it says what can be done next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kinroute.replay.arguments import OPTIMUM, Asked
from kinroute.replay.arm import Arm
from kinroute.replay.hints import Hints
from kinroute.replay.loads import Load
from kinroute.replay.optimum import Bound
from kinroute.replay.results import RunResult
from kinroute.replay.rows import Outcome, Place
from kinroute.replay.service import CostModel
from kinroute.replay.tasks import Clairvoyant, Matching, Simulation, Survey, Surveyed, SweepTask, Windowed, loads_of
from kinroute.replay.windows import Window

ORDERS = ("lru first", "lru last")


@dataclass(slots=True)
class _OneLoad:
    surveyed: Surveyed | None = None
    runs: dict[tuple[Place, str | None], dict[str, RunResult]] = field(default_factory=dict)
    bounds: dict[Place, Bound] = field(default_factory=dict)
    windows: dict[Place, tuple[Window, ...]] = field(default_factory=dict)
    needs: dict[int, int | None] = field(default_factory=dict)
    waits_for: int = 1


class Sweep:
    """For each load: a survey, then an arm for each place and policy and the optimum, then what LRU needs for as much.

    In the closed loop arrivals depend on the arm, so there is no optimum and nothing to match; instead the arms are
    carried out in both orders.
    """

    def __init__(self, asked: Asked, costs: CostModel, *, recorded: bool = False) -> None:
        """`recorded`: the traces are a worker's recordings."""
        self._asked = asked
        self._costs = costs
        self._loads = {load: _OneLoad() for load in loads_of(asked, recorded=recorded)}

    @property
    def num_tasks(self) -> int:
        """Of all loads, all in all."""
        asked = self._asked
        places = len(asked.points if asked.capacities is None else asked.capacities)
        arms = 1 + len(asked.policies)
        of_place = 2 * arms if asked.closed_loop else arms + 1
        windows = places * sum(load.is_recorded for load in self._loads) * (not asked.closed_loop)
        return len(self._loads) * (1 + places * of_place + (not asked.closed_loop)) + windows

    def begin(self) -> list[SweepTask]:
        asked = self._asked
        return [
            Survey(load, asked.capacities, asked.points, self._colder, asked.role, asked.warmup) for load in self._loads
        ]

    def feed(self, task: SweepTask, found: object) -> list[SweepTask]:
        """What can be done now that this was found; `found` is None where the task failed."""
        one = self._loads[task.load]
        one.waits_for -= 1
        following: list[SweepTask] = []
        match task, found:
            case Survey(), Surveyed():
                one.surveyed = found
                following = [each for place in found.places for each in self._of_place(task.load, place)]
            case Simulation(), RunResult():
                one.runs.setdefault((task.place, task.order), {})[task.arm.policy] = found
            case Clairvoyant(), Bound():
                one.bounds[task.place] = found
            case Windowed(), tuple():
                one.windows[task.place] = found
            case Matching(), dict():
                one.needs = found
            case _:
                assert found is None, f"{task.name} found {found!r}"
        one.waits_for += len(following)
        if not one.waits_for and not isinstance(task, Matching):
            following = self._matching(task.load, one)
            one.waits_for = len(following)
        return following

    def outcomes(self) -> Iterator[Outcome]:
        """By load, then by place; what failed is left out."""
        policies = ("lru", *self._asked.policies)
        for load, one in self._loads.items():
            if one.surveyed is None:
                continue
            for place in one.surveyed.places:
                for order in self._orders:
                    runs = one.runs.get((place, order), {})
                    yield Outcome(
                        load=load,
                        place=place,
                        role=self._asked.role,
                        hints=str(Hints.parse(self._asked.hints)),
                        tiers=self._tiers(place),
                        ceiling=one.surveyed.ceiling,
                        block_tokens=one.surveyed.block_tokens,
                        arms={policy: runs[policy] for policy in policies if policy in runs},
                        optimum=one.bounds.get(place),
                        windows=one.windows.get(place, ()),
                        lru_needs={name: one.needs.get(hits) for name, hits in _hits(runs, one.bounds.get(place))},
                        order=order,
                    )

    @property
    def _orders(self) -> tuple[str | None, ...]:
        return ORDERS if self._asked.closed_loop else (None,)

    @property
    def _colder(self) -> int:
        return self._asked.host_blocks + self._asked.disk_blocks

    def _tiers(self, place: Place) -> dict[str, int]:
        asked = self._asked
        return {"device": place.capacity_blocks, "host": asked.host_blocks, "disk": asked.disk_blocks}

    def _of_place(self, load: Load, place: Place) -> list[SweepTask]:
        policies = ("lru", *self._asked.policies)
        tasks: list[SweepTask] = [
            Simulation(load, place, self._arm(policy, place), order)
            for order in self._orders
            for policy in (policies[::-1] if order == ORDERS[1] else policies)
        ]
        if not self._asked.closed_loop:
            tasks.append(Clairvoyant(load, place, self._colder, self._asked.role, self._asked.warmup))
            if load.is_recorded:
                tasks.append(Windowed(load, place, self._colder, self._asked.role, self._asked.window))
        return tasks

    def _arm(self, policy: str, place: Place) -> Arm:
        asked = self._asked
        return Arm(
            policy=policy,
            capacity_blocks=place.capacity_blocks,
            host_blocks=asked.host_blocks,
            disk_blocks=asked.disk_blocks,
            role=asked.role,
            hints=Hints.parse(asked.hints),
            tp=asked.tp,
            warmup=asked.warmup,
            closed_loop=asked.closed_loop,
            costs=self._costs,
        )

    def _matching(self, load: Load, one: _OneLoad) -> list[SweepTask]:
        hits = {
            hits
            for (place, _), runs in one.runs.items()
            for name, hits in _hits(runs, one.bounds.get(place))
            if name != "lru"
        }
        if self._asked.closed_loop or not hits:
            return []
        return [Matching(load, tuple(sorted(hits)), self._asked.role, self._asked.warmup)]


def _hits(runs: dict[str, RunResult], bound: Bound | None) -> Iterator[tuple[str, int]]:
    yield from ((policy, result.hit_blocks) for policy, result in runs.items())
    if bound is not None:
        yield OPTIMUM, bound.hit_blocks
