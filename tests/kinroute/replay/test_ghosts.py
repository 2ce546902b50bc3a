"""Ghosts beside a simulated worker: what they count, and what the guard makes of it."""

from __future__ import annotations

import pytest

from kinroute.replay.arm import Arm
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.simulation import OpenLoop, simulate
from tests.kinroute.replay.loads import load
from tests.kinroute.replay.plain import asked
from worker.core.config import RetentionPolicy
from worker.core.ghosts import Ghosts
from worker.core.guard import WINDOW


def watched(requests: list[PlayedRequest], policy: str, capacity: int, role: str) -> Ghosts:
    loop = OpenLoop(requests, Arm(policy, capacity, warmup=0.0, role=role), lambda ended: None)  # type: ignore[arg-type]
    loop.run()
    assert loop.worker.ghosts is not None
    return loop.worker.ghosts


def computed(requests: list[PlayedRequest], policy: str, capacity: int, role: str) -> int:
    arm = Arm(policy, capacity, warmup=0.0, role=role)  # type: ignore[arg-type]
    return simulate(requests, arm, lambda ended: None).uncached_tokens


@pytest.mark.parametrize("policy", ["subagent", "return_index"])
@pytest.mark.parametrize(("role", "within"), [("context", 0.0), ("aggregated", 0.03)])
def test_beside_another_policy_the_ghost_counts_what_lru_itself_computes(policy: str, role: str, within: float) -> None:
    """All but exactly where answers grow: a running one has its pages before the ghost has its blocks."""
    for seed, capacity in ((0, 60), (1, 100)):
        requests = load(seed, 150)
        ghosts = watched(requests, policy, capacity, role)

        assert sum(one.lru for one in ghosts.uncached.values()) == pytest.approx(
            computed(requests, "lru", capacity, role), rel=within
        )
        assert sum(one.real for one in ghosts.uncached.values()) == computed(requests, policy, capacity, role)


def test_a_load_that_is_bad_for_the_policy_makes_it_fall_back_to_lru() -> None:
    """Each child is asked again just after its parent returned, when others have pushed its demoted blocks out."""
    requests: list[PlayedRequest] = []
    for at in range(300):
        t_s = 20.0 * at
        requests += [
            asked(t_s, (100, 10), conversation="child", parent="parent"),
            asked(t_s + 5, (0, 10), conversation="parent"),
            asked(t_s + 10, (1000 + 20 * at, 8), conversation=f"other {at}"),
        ]

    ghosts = watched(requests, "subagent", 32, "context")

    assert ghosts.guard.switches > 0
    assert ghosts.guard.active is RetentionPolicy.LRU
    lost = sum(one.real - one.lru for one in ghosts.uncached.values())
    assert 0 < lost < 1.2 * 36 * WINDOW / 3, "what one window of such requests costs"
