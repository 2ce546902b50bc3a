"""The guard: a policy that costs clearly more than `lru` gives way to it, and is tried again."""

from __future__ import annotations

import random

from worker.core.config import RetentionPolicy
from worker.core.guard import FIRST_PROBATION, WINDOW, Guard

INDEX, LRU, SUBAGENT = RetentionPolicy.RETURN_INDEX, RetentionPolicy.LRU, RetentionPolicy.SUBAGENT


def windows(guard: Guard, count: int, *, real: float, ghost: float = 1.0, lru: int = 1000, seed: int = 1) -> list[str]:
    """So many windows, in which a request costs that many times what `lru` costs, give or take; the switches."""
    dice = random.Random(seed)
    told = []
    for _ in range(count * WINDOW):
        noise = dice.uniform(-0.05, 0.05)
        wanted = guard.admitted(int(lru * (real + noise)), lru, int(lru * ghost))
        if wanted is not None:
            told.append(str(wanted))
    return told


def test_a_policy_that_costs_more_than_lru_falls_back_at_the_end_of_the_window() -> None:
    guard = Guard(INDEX)

    assert windows(guard, 1, real=1.1) == ["lru"]
    assert (guard.active, guard.switches) == (LRU, 1)


def test_a_policy_that_saves_or_costs_less_than_the_margin_stays() -> None:
    guard = Guard(INDEX)

    assert windows(guard, 8, real=0.7) == []
    assert windows(guard, 8, real=1.005) == []
    assert guard.active is INDEX


def test_a_few_unlucky_requests_are_no_reason() -> None:
    guard = Guard(INDEX)

    for at in range(WINDOW):
        assert guard.admitted(100_000 if at in (7, 99) else 1000, 1000, 1000) is None


def test_the_policy_is_back_in_force_once_its_ghost_does_better() -> None:
    guard = Guard(INDEX)
    windows(guard, 1, real=1.1)

    assert windows(guard, 2, real=1.0, ghost=1.0) == []
    assert windows(guard, 1, real=1.0, ghost=0.9) == ["return_index"]


def test_a_policy_without_a_ghost_is_tried_again_after_a_while_that_doubles() -> None:
    guard = Guard(SUBAGENT)
    windows(guard, 1, real=1.1)

    assert windows(guard, FIRST_PROBATION, real=1.0) == ["subagent"]
    assert windows(guard, 1, real=1.1) == ["lru"]
    assert windows(guard, FIRST_PROBATION, real=1.0) == []
    assert windows(guard, FIRST_PROBATION, real=1.0) == ["subagent"]


def test_lru_itself_never_falls_back() -> None:
    assert windows(Guard(LRU), 3, real=1.2) == []
