from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kinroute.replay.lru import Recency
from kinroute.replay.segments import Role, segments_of
from kinroute.replay.walk import Walk
from tests.kinroute.replay.naive_blocks import Naive
from tests.kinroute.replay.words import Words, load, words


def lru_hits(capacity: int, *requests: Words, role: Role = "context") -> list[int]:
    segments = segments_of(load(*requests), role=role)
    walk = Walk(segments, capacity, Recency(segments))
    walk.run()
    return walk.hits.tolist()


def test_the_path_that_was_let_go_first_leaves_first_from_its_tail() -> None:
    first, second, third = Words(0, 1, "abcd"), Words(9, 1, "vwxy"), Words(18, 1, "ef")

    assert lru_hits(8, first, second, third, Words(27, 1, "abcde")) == [0, 0, 0, 2]
    assert lru_hits(8, first, second, third, Words(27, 1, "vwxyz")) == [0, 0, 0, 4]


def test_what_is_held_does_not_leave_and_a_context_leg_holds_it_only_until_it_is_handed_over() -> None:
    long, other, third = Words(0, 20, "abcd"), Words(3, 1, "vwxy"), Words(12, 1, "ef")
    asked = (long, other, third, Words(30, 1, "abcde"))

    assert lru_hits(9, *asked, role="aggregated") == [0, 0, 0, 4]
    assert lru_hits(9, *asked, role="context") == [0, 0, 0, 3]


def test_who_comes_with_a_sibling_waits_for_its_prompt() -> None:
    assert lru_hits(9, Words(0, 5, "abcd"), Words(0, 5, "abce")) == [0, 3]


def test_who_finds_no_room_waits_until_there_is_some() -> None:
    assert lru_hits(6, Words(0, 5, "abcd"), Words(1, 5, "efg"), Words(1, 5, "abcd")) == [0, 0, 3]


def test_the_last_block_of_a_prompt_is_never_a_hit() -> None:
    assert lru_hits(9, Words(0, 1, "abcd"), Words(9, 1, "abcd")) == [0, 3]


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    assert lru_hits(3, Words(0, 1, "abcd"), Words(9, 1, "ab"), Words(18, 1, "abc")) == [0, 0, 2]


def test_an_answer_is_there_when_it_is_over() -> None:
    turn, again = Words(0, 9, "ab", answer="cd"), Words(20, 1, "abcde")

    assert lru_hits(9, turn, Words(5, 1, "abce"), again, role="aggregated") == [0, 2, 4]
    assert lru_hits(9, turn, Words(5, 1, "abce"), again, role="context") == [0, 2, 3]


@settings(max_examples=150, deadline=None)
@given(words(), st.integers(2, 12), st.sampled_from(["aggregated", "context"]))
def test_lru_by_the_segment_is_lru_by_the_block(requests: list[Words], capacity: int, role: Role) -> None:
    asked = load(*requests)
    segments = segments_of(asked, role=role)
    walk = Walk(segments, capacity, Recency(segments))
    naive = Naive(capacity, role)

    walk.run()
    naive.play(asked)

    assert walk.hits.tolist() == [naive.hits[one] for one in range(len(asked))]
