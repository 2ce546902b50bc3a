"""A group ends at the first plan in which its ranks decided differently; that it happened is known after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

from worker.core.outputs import LoadSnapshot
from worker.exits import ExitCode
from worker.gate import StepTold
from worker.launcher import Launcher
from worker.place import Place
from worker.rank_group import Ended, RankGroup, Said
from worker.service import Service
from worker.settings import WorkerSettings
from worker.telemetry import Metrics

SETTINGS = WorkerSettings(model=Path("/models/m"), served_model_name="m")
PLACE = Place(
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    master_addr="127.0.0.1",
    master_port=1,
    control_port=2,
    token=b"t" * 32,
)


class OneThatDiffered:
    """A group whose rank 0 said that it failed, and ended."""

    heard_s: dict[int, float] = {}  # noqa: RUF012 - as the group's own

    def events(self, timeout_s: float) -> Iterator[Said | Ended]:
        yield Said(0, "failed", {"why": "rank 1 decided otherwise", "mismatches": 3})
        yield Ended(0, ExitCode.FAILED)

    def kill(self, *, spare_leader: bool = False) -> None: ...


def test_the_launcher_tells_the_next_group_how_often_ranks_differed() -> None:
    with closing(Launcher(SETTINGS)) as launcher:
        assert launcher.mismatches == 0
        ending = launcher.supervise(cast(RankGroup, OneThatDiffered()))

    assert ending.why == "rank 1 decided otherwise"
    assert launcher.mismatches == 3


def test_a_rank_hears_of_it_through_its_environment() -> None:
    told = replace(PLACE, mismatches=3)

    assert Place.from_environment(SETTINGS, told.to_environment()) == told


def test_what_happened_before_and_what_happens_are_one_count() -> None:
    metrics = Metrics()
    metrics.count_mismatches(3)
    metrics.count_mismatches()

    assert metrics.num_mismatches == 4
    assert metrics.registry.get_sample_value("kinroute_worker_digest_mismatches_total") == 4


def test_suspended_requests_are_shown_as_the_last_step_left_them() -> None:
    service = Service(SETTINGS, lambda command: None)
    for suspended in (2, 1):
        service.deliver(StepTold(1, (), LoadSnapshot(1, 5, 9, 3, 8, suspended)))

    assert service.registry.get_sample_value("kinroute_worker_suspended_requests") == 1
