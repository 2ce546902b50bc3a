"""What a step tells leaves only once every rank has decided that step alike, and in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.core.outputs import LoadSnapshot, TokenOut
from worker.core.types import RequestKey
from worker.gate import Gate, StepTold

LOAD = LoadSnapshot(0, 0, 0, 0, 4)


def step(number: int) -> StepTold:
    return StepTold(number, [TokenOut(RequestKey(1), number)], LOAD)


def test_a_step_is_held_until_it_is_agreed() -> None:
    delivered: list[StepTold] = []
    gate = Gate(delivered.append)

    gate.hold(step(1))
    assert delivered == []
    gate.open(1)

    assert delivered == [step(1)]


def test_an_agreed_step_does_not_wait() -> None:
    delivered: list[StepTold] = []
    gate = Gate(delivered.append)
    gate.open(1)

    gate.hold(step(1))

    assert delivered == [step(1)]


def test_what_is_told_before_the_first_step_waits_for_no_agreement() -> None:
    delivered: list[StepTold] = []

    Gate(delivered.append).hold(step(0))

    assert delivered == [step(0)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_steps_leave_in_order_and_never_before_their_agreement(holds: list[bool]) -> None:
    delivered: list[int] = []
    gate = Gate(lambda told: delivered.append(told.number))
    held = agreed = 0

    for hold in holds:
        if hold:
            held += 1
            gate.hold(step(held))
        else:
            agreed += 1
            gate.open(agreed)
        assert delivered == list(range(1, min(held, agreed) + 1))
