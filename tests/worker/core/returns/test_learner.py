from __future__ import annotations

import math

import pytest

from worker.core.conversations import StopReason
from worker.core.returns.ages import EDGES_MS, NUM_BUCKETS, bucket_of
from worker.core.returns.classes import EVERYBODY, Features, class_of
from worker.core.returns.index import Idle
from worker.core.returns.learner import PRIOR_HAZARD, PSEUDO_RETURNS, SMALLEST_INDEX, Learner
from worker.core.returns.tables import LEAST, MOST

TOOL = class_of(Features(stop=StopReason.TOOL_CALL))
DONE = class_of(Features(stop=StopReason.END_OF_TURN))
OTHER = class_of(Features(stop=StopReason.LENGTH))


def taught(group: int, age_ms: int, returns: int, stays: int, learner: Learner | None = None) -> Learner:
    """So many of a class came back at an age, and so many have not within an hour."""
    learner = learner or Learner()
    for _ in range(returns):
        learner.idled(group, 0, age_ms)
        learner.returned(group, age_ms)
    for _ in range(stays):
        learner.idled(group, 0, 3_600_000)
    return learner


def test_before_anything_is_known_the_younger_is_worth_more() -> None:
    row = Learner().rows([])[EVERYBODY]

    assert len(row) == NUM_BUCKETS
    assert sorted(row, reverse=True) == list(row)
    assert len(set(row)) == NUM_BUCKETS


def test_the_index_of_a_steady_hazard_is_that_hazard() -> None:
    """However long one waits, each second held brings the same chance: no horizon is better than another."""
    learner = Learner()
    for bucket in range(NUM_BUCKETS):
        width_ms = (EDGES_MS[bucket + 1] if bucket + 1 < NUM_BUCKETS else 2 * EDGES_MS[bucket]) - EDGES_MS[bucket]
        for _ in range(1000):
            learner.idled(TOOL, EDGES_MS[bucket], EDGES_MS[bucket] + width_ms)
        for _ in range(width_ms // 10):
            learner.returned(TOOL, EDGES_MS[bucket])

    steady = 1000 * math.log10(0.1 / SMALLEST_INDEX)
    assert all(abs(value - steady) < 30 for value in learner.rows([])[TOOL][4:])


def test_who_returns_is_worth_more_than_who_does_not() -> None:
    rows = taught(DONE, 2000, 1, 99, taught(TOOL, 2000, 99, 1)).rows([])

    young = bucket_of(1000)
    assert rows[TOOL][young] > rows[DONE][young]
    assert rows[TOOL][young] > rows[TOOL][bucket_of(60_000)]


def test_what_has_not_returned_yet_is_counted_for_as_long_as_it_waits() -> None:
    learner = taught(TOOL, 2000, 50, 0)
    waiting = [Idle(TOOL, 0, 600_000)] * 50

    assert learner.rows(waiting)[TOOL][bucket_of(10_000)] < learner.rows([])[TOOL][bucket_of(10_000)]
    assert learner.rows(waiting) == learner.rows(waiting), "asking teaches nothing"


def test_a_class_of_which_little_was_seen_follows_the_coarser_one() -> None:
    rare = class_of(Features(stop=StopReason.TOOL_CALL, turns=20))
    learner = taught(TOOL, 2000, 200, 2)
    learner.idled(rare, 0, 100)

    rows, young = learner.rows([]), bucket_of(1000)
    assert abs(rows[rare][young] - rows[TOOL][young]) < 100
    assert OTHER not in rows


def test_a_bucket_draws_on_the_coarser_hazard_by_a_few_returns() -> None:
    learner = Learner()
    learner.idled(TOOL, 0, 250)

    hazard = learner._hazards(learner._idle_s)[TOOL][0]
    everybody = (0 + 4.0) / (0.25 + 4.0 / (PRIOR_HAZARD / 0.125))
    expected = everybody
    for _ in range(5):
        expected = PSEUDO_RETURNS / (0.25 + PSEUDO_RETURNS / expected)
    assert hazard == pytest.approx(expected)


def test_idle_time_falls_into_the_buckets_that_it_passed() -> None:
    learner = Learner()
    learner.idled(TOOL, 100, 7000)

    seconds = learner._idle_s[0]
    assert seconds.sum() == pytest.approx(6.9)
    assert seconds[0] == pytest.approx(0.15)
    assert seconds[bucket_of(1000)] == pytest.approx((EDGES_MS[bucket_of(1000) + 1] - EDGES_MS[bucket_of(1000)]) / 1000)
    assert not seconds[bucket_of(7000) + 1 :].any()


def test_values_stay_within_their_bounds() -> None:
    rows = taught(DONE, 10, 0, 10_000, taught(TOOL, 1, 10_000, 0)).rows([])

    assert all(LEAST <= value <= MOST for row in rows.values() for value in row)
