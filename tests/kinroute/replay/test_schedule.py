from __future__ import annotations

from kinroute.replay.schedule import Schedule, as_they_come, certain
from kinroute.replay.segments import Role, segments_of
from tests.kinroute.replay.words import Words, load


def schedule_of(*requests: Words, role: Role = "aggregated") -> Schedule:
    return certain(segments_of(load(*requests), role=role))


def test_who_shares_nothing_begins_when_the_step_is_over_that_runs_as_it_comes() -> None:
    found = schedule_of(Words(0, 9, "ab"), Words(0, 9, "xy"))

    assert found.starts.tolist() == [1, 1]
    assert found.ends.tolist() == [9, 9]
    assert not found.is_free.any()


def test_siblings_wait_once_for_what_they_have_in_common_and_again_where_some_share_more() -> None:
    alike = schedule_of(Words(0, 20, "abc"), Words(0, 20, "abd"), Words(0, 20, "abe"))
    nested = schedule_of(Words(0, 20, "abc"), Words(0, 20, "abde"), Words(0, 20, "abdf"))

    assert alike.starts.tolist() == [1, 2, 2]
    assert nested.starts.tolist() == [1, 2, 3]


def test_who_goes_on_with_an_answer_that_may_just_be_kept_begins_when_it_is() -> None:
    found = schedule_of(Words(0, 9, "ab", answer="cd"), Words(8, 20, "abcdx"), Words(20, 20, "abcdy"))

    assert found.answers[0] == 10
    assert found.starts.tolist() == [1, 10, 21]


def test_of_a_request_that_may_be_over_before_it_may_begin_the_blocks_take_no_place() -> None:
    requests = load(Words(0, 9, "abc"), Words(0, 1, "abd"), Words(30, 9, "xyz"))
    segments = segments_of(requests, role="aggregated")

    found = certain(segments)

    assert found.is_free[segments.path(1)].all()
    assert not found.is_free[segments.path(2)].any()
    # "ab", which each may have of the other.
    assert found.given.tolist() == [2, 2, 0]


def test_the_schedule_of_those_that_begin_as_they_come_holds_them_a_plan_at_least() -> None:
    found = as_they_come(segments_of(load(Words(4, 0, "ab")), role="aggregated"))

    assert (found.starts.tolist(), found.ends.tolist()) == ([4], [5])
