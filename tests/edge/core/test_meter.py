"""A limit by the minute, as one number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.meter import Meter

PAST_S = 1e6
"""About what a clock says of a machine that runs for days."""


def test_a_whole_minutes_worth_fits_at_once_and_then_one_more_as_its_part_of_the_minute_passes() -> None:
    meter = Meter()
    for _ in range(6):
        assert meter.wait_s(1, 6, 0.0) == 0.0
        meter.add(1, 6, 0.0)

    assert meter.wait_s(1, 6, 0.0) == pytest.approx(10.0)
    assert meter.wait_s(1, 6, 10.0) == 0.0
    assert meter.wait_s(2, 6, 10.0) == pytest.approx(10.0)


def test_what_is_left_and_when_all_is_there_again() -> None:
    meter = Meter()
    assert (meter.left(100, 5.0), meter.reset_s(5.0)) == (100, 0.0)

    meter.add(70, 100, 5.0)

    assert meter.left(100, 5.0) == 30
    assert meter.reset_s(5.0) == pytest.approx(42.0)
    assert (meter.left(100, 47.0), meter.reset_s(47.0)) == (100, 0.0)
    assert not meter.is_used(47.0)


def test_what_goes_over_the_limit_has_to_be_waited_for() -> None:
    meter = Meter()
    meter.add(250, 100, 0.0)

    assert meter.left(100, 0.0) == 0
    assert meter.wait_s(1, 100, 0.0) == pytest.approx(90.6)


@given(
    limit=st.integers(1, 10**7),
    steps=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.0, 90.0)), max_size=20),
    amount=st.integers(0, 10**7),
)
def test_who_waits_as_long_as_it_was_told_fits_and_what_is_left_fits_at_once(
    limit: int, steps: list[tuple[int, float]], amount: int
) -> None:
    meter, now_s = Meter(), PAST_S
    for added, pause_s in steps:
        meter.add(added, limit, now_s)
        now_s += pause_s
    amount = min(amount, limit)

    assert meter.wait_s(amount, limit, now_s + meter.wait_s(amount, limit, now_s)) == 0.0
    left = meter.left(limit, now_s)
    assert 0 <= left <= limit
    assert meter.wait_s(left, limit, now_s) == 0.0 or left == 0
    assert meter.left(limit, now_s + meter.reset_s(now_s)) == limit


@given(limit=st.integers(1, 1000), pauses=st.lists(st.floats(0.0, 5.0), max_size=60))
def test_within_any_minute_at_most_twice_the_limit_fits(limit: int, pauses: list[float]) -> None:
    meter, now_s, times = Meter(), PAST_S, []
    for pause_s in pauses:
        now_s += pause_s
        for _ in range(limit // 20 + 1):
            if not meter.wait_s(1, limit, now_s):
                meter.add(1, limit, now_s)
                times.append(now_s)

    for end_s in times:
        assert sum(end_s - 60.0 < at_s <= end_s for at_s in times) <= 2 * limit + 1
