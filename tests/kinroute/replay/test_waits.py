from __future__ import annotations

from kinroute.replay.waits import Wait, waits_of
from tests.kinroute.replay.loads import load
from tests.kinroute.replay.plain import asked


def near(wait: Wait) -> Wait:
    return Wait(round(wait.after_s, 6), wait.ends, wait.arrival)


def test_a_turn_waits_for_the_answer_before_it_and_thinks_as_long() -> None:
    waits = waits_of([asked(3.0, (0, 3)), asked(6.5, (0, 4))])

    assert waits == [Wait(3.0), Wait(2.5, ends=(0,))]


def test_a_turn_waits_for_the_sub_agents_that_had_ended_and_for_no_other() -> None:
    waits = waits_of(
        [
            asked(0.0, (0, 3)),
            asked(1.5, (10, 3), conversation="b", parent="a"),
            asked(2.0, (20, 3), conversation="c", parent="a", duration_s=9.0),
            asked(3.0, (10, 4), conversation="b", parent="a"),
            asked(4.75, (0, 4)),
        ]
    )

    assert waits[1:4] == [Wait(0.5, ends=(0,)), Wait(1.0, ends=(0,)), Wait(0.5, ends=(1,))]
    assert waits[4] == Wait(0.75, ends=(0, 3))


def test_a_sub_agent_of_an_earlier_turn_is_waited_for_no_more() -> None:
    waits = waits_of(
        [
            asked(0.0, (0, 3)),
            asked(1.0, (10, 3), conversation="b", parent="a"),
            asked(5.0, (0, 4)),
            asked(7.0, (0, 5)),
        ]
    )

    assert waits[3] == Wait(1.0, ends=(2,))


def test_what_began_beside_an_answer_begins_beside_it_again() -> None:
    waits = waits_of(
        [
            asked(1.0, (0, 3), duration_s=10.0),
            asked(1.5, (10, 1), conversation="title", parent="a"),
            asked(2.0, (30, 1), conversation="lone"),
            asked(4.0, (0, 3)),
        ]
    )

    assert waits[1:] == [Wait(0.5, arrival=0), Wait(1.0, arrival=0), Wait(3.0, arrival=0)]


def test_a_session_follows_the_one_before_it_in_its_lane() -> None:
    waits = waits_of(
        [
            asked(0.0, (0, 3), conversation="0/a"),
            asked(0.5, (5, 3), conversation="0/b", parent="0/a"),
            asked(0.0, (10, 3), conversation="1/a", play=1, lane=1),
            asked(2.0, (20, 3), conversation="2/a", play=2, lane=0),
        ]
    )

    assert waits[2] == Wait(0.0)
    assert waits[3] == Wait(0.5, ends=(0, 1))


def test_with_recorded_durations_everything_comes_as_it_was_recorded() -> None:
    requests = load(1, 200)
    came: list[float] = []

    for wait in waits_of(requests):
        anchors = [came[one] + requests[one].duration_s for one in wait.ends]
        anchors += [came[wait.arrival]] if wait.arrival is not None else []
        came.append(max(anchors, default=0.0) + wait.after_s)

    assert [round(at - request.t_s, 6) for at, request in zip(came, requests, strict=True)] == [0.0] * 200
    assert all(near(wait).after_s >= 0 for wait in waits_of(requests))
