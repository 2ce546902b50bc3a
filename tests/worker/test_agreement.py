"""Ranks agree on a plan when all of them reported the same digest of it, however their reports interleave."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.agreement import Agreement, Differs


def test_a_plan_is_agreed_once_its_last_rank_reported() -> None:
    agreement = Agreement(2)

    agreement.feed(0, 1, b"a")
    agreement.feed(0, 2, b"b")
    before = agreement.agreed
    agreement.feed(1, 1, b"a")

    assert (before, agreement.agreed) == (-1, 1)


def test_the_first_plan_that_differs_is_named_with_its_rank() -> None:
    agreement = Agreement(3)
    for rank in range(3):
        agreement.feed(rank, 1, b"a")

    agreement.feed(0, 2, b"b")
    agreement.feed(1, 2, b"b")

    assert agreement.feed(2, 2, b"x") == Differs(rank=2, number=2)
    assert agreement.agreed == 1


def test_a_rank_that_skips_a_plan_is_an_error() -> None:
    agreement = Agreement(2)
    agreement.feed(0, 1, b"a")

    with pytest.raises(ValueError, match="rank 1 reports plan 2 where rank 0 reports plan 1"):
        agreement.feed(1, 2, b"b")


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_agreement_is_the_slowest_ranks_last_plan(world_size: int, plans: int, data: st.DataObject) -> None:
    agreement = Agreement(world_size)
    reported = [0] * world_size

    while min(reported) < plans:
        rank = data.draw(st.sampled_from([r for r in range(world_size) if reported[r] < plans]))
        reported[rank] += 1
        agreement.feed(rank, reported[rank], bytes([reported[rank]]))
        assert agreement.agreed == (min(reported) or -1)
