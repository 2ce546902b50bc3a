"""A step's tokens, shared among tenants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.core.shares import Want, level, share_out

A, B, C = b"a", b"b", b"c"


def test_one_tenant_has_it_all_oldest_first() -> None:
    assert share_out(10, [Want(A, 8), Want(A, 8)], {A: 50}) == ([8, 2], {A: 0})
    assert share_out(20, [Want(A, 8), Want(A, 8)], {A: 50}) == ([8, 8], {A: 4})


def test_those_that_decode_have_theirs_first() -> None:
    assert share_out(4, [Want(A, 100), Want(A, 1), Want(B, 1)], {}) == ([2, 1, 1], {A: 0})


def test_a_long_prompt_leaves_half_of_a_step_to_another_tenant_that_begins() -> None:
    assert share_out(10, [Want(A, 1000)], {B: 1000}) == ([5], {A: 0, B: 5})
    assert share_out(10, [Want(A, 1000)], {B: 2}) == ([8], {A: 0, B: 2})


def test_what_a_tenant_does_not_want_the_others_have_alike() -> None:
    assert level(30, {A: 100, B: 4, C: 100}) == {A: 13, B: 4, C: 13}
    assert level(10, {A: 3, B: 4}) == {A: 3, B: 4}


def test_what_cannot_be_divided_goes_to_those_that_come_first() -> None:
    assert level(5, {A: 9, B: 9, C: 9}) == {A: 2, B: 2, C: 1}
    assert level(2, {A: 9, B: 1, C: 9}) == {A: 1, B: 1, C: 0}


@given(
    budget=st.integers(0, 60),
    running=st.lists(st.builds(Want, st.sampled_from([A, B, C]), st.integers(0, 40)), max_size=8),
    waiting=st.dictionaries(st.sampled_from([A, B, C, b"d"]), st.integers(1, 40)),
)
def test_nothing_is_wasted_and_nobody_gets_more_than_another_that_wants_more(
    budget: int, running: list[Want], waiting: dict[bytes, int]
) -> None:
    counts, allowed = share_out(budget, running, waiting)

    assert all(0 <= count <= want.left for count, want in zip(counts, running, strict=True))
    wanted = sum(want.left for want in running) + sum(waiting.values())
    assert sum(counts) + sum(allowed.values()) == min(budget, wanted)
    prefills = [(want, count) for want, count in zip(running, counts, strict=True) if want.left > 1]
    got, wants = dict(allowed), dict(waiting)
    for want, count in prefills:
        got[want.tenant] = got.get(want.tenant, 0) + count
        wants[want.tenant] = wants.get(want.tenant, 0) + want.left
    for tenant, tokens in got.items():
        assert tokens == wants[tenant] or tokens >= max(got.values()) - 1
