"""One turn's life: what each event asks for, and what can never happen."""

from __future__ import annotations

import pytest

from edge.core.errors import Code, EdgeError
from edge.core.life_events import (
    CallerGone,
    CallerStopped,
    CancelLeg,
    DeadlinePassed,
    Event,
    KvArrived,
    LegFailed,
    LegFinished,
    NotPlaced,
    Phase,
    Place,
    Placed,
    Prefilled,
    SendEnded,
    SendGenerating,
    Started,
    State,
    SubmitLeg,
    TellFailed,
    TellFinished,
    TellStarted,
    TellTokens,
    Tokens,
)
from edge.core.lifecycle import Deadlines, RequestLife
from edge.core.types import FinishReason, TokenLogprob, Usage, WorkerId

C, D = WorkerId("context:1"), WorkerId("generation:1")
C2, D2 = WorkerId("context:2"), WorkerId("generation:2")
LOST = EdgeError(Code.WORKER_FAILED, "A worker was lost.", retryable=True)
STOP = FinishReason.STOP


def lost(leg: int) -> LegFailed:
    return LegFailed(leg, LOST, retryable=True)


def make_life(*events: Event, max_tokens: int | None = None) -> RequestLife:
    """A turn of 3 prompt tokens to which `events` have happened."""
    life = RequestLife(3, max_tokens)
    life.begin()
    for event in events:
        life.feed(event)
    return life


IN_CONTEXT = (Placed(C, D), Started(1, 2))
MOVING = (*IN_CONTEXT, Prefilled(1, b"ref", 10))
DECODING = (*MOVING, KvArrived(2), Tokens(2, (11,)))
ALONE = (Placed(None, D),)


def test_a_turn_begins_by_asking_for_workers() -> None:
    assert RequestLife(3).begin() == [Place(())]


def test_the_prompt_is_prefilled_on_the_context_worker() -> None:
    life = make_life()

    assert life.feed(Placed(C, D)) == [SubmitLeg(1, Phase.CONTEXT, C)]
    assert life.feed(Started(1, 2)) == [TellStarted(2)]


def test_the_first_token_is_told_as_soon_as_it_exists_and_the_pages_are_handed_over() -> None:
    logprob = TokenLogprob(10, -0.5)

    assert make_life(*IN_CONTEXT).feed(Prefilled(1, b"ref", 10, logprob)) == [
        SendGenerating(C),
        TellTokens((10,), (logprob,)),
        SubmitLeg(2, Phase.GENERATION, D, kv_session=b"ref"),
    ]


def test_the_answer_ends_with_its_usage_and_the_context_worker_hears_how() -> None:
    life = make_life(*DECODING)

    assert life.feed(LegFinished(2, FinishReason.LENGTH)) == [
        SendEnded(C, FinishReason.LENGTH),
        TellFinished(FinishReason.LENGTH, Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2)),
    ]
    assert life.over


def test_one_worker_for_both_phases_gets_one_leg() -> None:
    life = make_life()

    assert life.feed(Placed(None, D)) == [SubmitLeg(1, Phase.AGGREGATED, D)]
    assert life.feed(Tokens(1, (10,))) == [TellTokens((10,), None)]
    assert life.feed(LegFinished(1, STOP)) == [SendEnded(D, STOP), TellFinished(STOP, Usage(3, 0, 1))]


def test_an_answer_of_one_token_needs_no_generation_leg() -> None:
    life = make_life(*IN_CONTEXT, Tokens(1, (10,)))

    assert life.feed(LegFinished(1, FinishReason.LENGTH)) == [
        SendEnded(C, FinishReason.LENGTH),
        TellFinished(FinishReason.LENGTH, Usage(3, 2, 1)),
    ]


def test_a_context_leg_that_fails_is_tried_once_elsewhere() -> None:
    life = make_life(*IN_CONTEXT)

    assert life.feed(lost(1)) == [Place((C,))]
    assert life.feed(Placed(C2, D)) == [SubmitLeg(2, Phase.CONTEXT, C2)]
    assert life.feed(Started(2, 3)) == [], "the caller heard of cached tokens once"
    assert life.feed(lost(2)) == [TellFailed(LOST)]


def test_a_generation_leg_that_fails_is_tried_with_the_same_pages_while_they_are_pinned() -> None:
    life = make_life(*MOVING)

    assert life.feed(lost(2)) == [Place((D,), generation_only=True)]
    assert life.feed(Placed(None, D2)) == [SubmitLeg(3, Phase.GENERATION, D2, kv_session=b"ref")]


def test_without_the_pages_the_prompt_and_what_was_sent_are_prefilled_again() -> None:
    life = make_life(*MOVING)

    assert life.feed(lost(1)) == [], "the pull may have made it in time"
    assert life.feed(lost(2)) == [SendEnded(C, None), Place((C, D))]
    assert life.feed(Placed(C2, D2)) == [SubmitLeg(3, Phase.CONTEXT, C2, resumed=(10,))]
    assert life.feed(Prefilled(3, b"new", 11)) == [
        SendGenerating(C2),
        TellTokens((11,), None),
        SubmitLeg(4, Phase.GENERATION, D2, resumed=(10,), kv_session=b"new"),
    ]


@pytest.mark.parametrize("pin", [(), (LegFinished(1, STOP),)])
def test_a_reference_that_fails_twice_is_not_tried_a_third_time(pin: tuple[Event, ...]) -> None:
    """The worker that died may have had its pages: whether the pin's end is known by then is a race."""
    life = make_life(*MOVING, lost(2), Placed(None, D2), *pin)

    assert life.feed(lost(3))[-2:] == [SendEnded(C, None), Place((D, *([C] if pin else []), D2))]
    assert life.feed(Placed(C, D)) == [SubmitLeg(4, Phase.CONTEXT, C, resumed=(10,))]
    assert life.feed(Prefilled(4, b"new", 11))[-1] == SubmitLeg(5, Phase.GENERATION, D, (10,), b"new")
    assert life.feed(lost(5))[-1] == TellFailed(LOST)


def test_a_turn_whose_reference_no_worker_takes_is_prefilled_again() -> None:
    gone = EdgeError(Code.KV_SESSION_NOT_FOUND, "The pages of this prefill are gone.")
    life = make_life(*MOVING, LegFailed(2, gone, retryable=False), Placed(None, D2))

    assert life.feed(LegFailed(3, gone, retryable=False))[-1] == Place((D, D2))
    assert life.feed(Placed(C, D)) == [SubmitLeg(4, Phase.CONTEXT, C, resumed=(10,))]


def test_pages_lost_while_a_worker_is_sought_leave_it_to_that_worker_alone() -> None:
    life = make_life(*MOVING, lost(2))

    assert life.feed(lost(1)) == [SendEnded(C, None)]
    assert life.feed(Placed(None, D2)) == [SubmitLeg(3, Phase.AGGREGATED, D2, resumed=(10,))]


def test_a_context_worker_hears_once_that_the_answer_is_over() -> None:
    pin_lost = make_life(*MOVING, lost(2), lost(1), Placed(None, D2))
    answer_lost = make_life(*DECODING, lost(2))

    assert pin_lost.feed(CallerGone()) == [CancelLeg(3)]
    assert answer_lost.feed(NotPlaced(LOST)) == [TellFailed(LOST)]


def test_the_context_worker_too_may_say_that_its_pages_arrived() -> None:
    life = make_life(*MOVING)

    assert life.feed(KvArrived(1)) == []
    assert (life.state, list(life.legs)) == (State.DECODING, [2])


def test_a_generation_leg_that_starts_is_nothing_to_tell() -> None:
    assert make_life(*MOVING).feed(Started(2, 9)) == []


def test_a_worker_that_is_alone_decodes_from_its_first_token_on() -> None:
    life = make_life(*ALONE, Tokens(1, (10,)))

    assert life.state is State.DECODING
    assert life.feed(DeadlinePassed(State.DECODING))[0] == CancelLeg(1)


@pytest.mark.parametrize(
    ("event", "code"),
    [(DeadlinePassed(State.ALONE), Code.TIMED_OUT), (KvArrived(2), Code.WORKER_FAILED)],
)
def test_a_silent_or_confused_worker_is_no_reason_not_to_ask_again(event: Event, code: Code) -> None:
    told = make_life(*ALONE, lost(1), Placed(None, D2)).feed(event)[-1]

    assert isinstance(told, TellFailed)
    assert (told.error.code, told.error.retryable) == (code, True)


def test_pages_that_arrived_are_not_offered_again() -> None:
    life = make_life(*MOVING, KvArrived(2))

    assert life.feed(lost(2)) == [SendEnded(C, None), Place((D,))]
    assert life.feed(Placed(C, D2)) == [SubmitLeg(3, Phase.CONTEXT, C, resumed=(10,))]


def test_a_token_says_that_the_pages_arrived() -> None:
    life = make_life(*MOVING, Tokens(2, (11,)))

    assert life.feed(lost(2)) == [SendEnded(C, None), Place((D,))]


def test_an_answer_goes_on_from_what_was_sent_once() -> None:
    life = make_life(*DECODING)

    assert life.feed(lost(2)) == [SendEnded(C, None), Place((D,))]
    assert life.feed(Placed(None, D2)) == [SubmitLeg(3, Phase.AGGREGATED, D2, resumed=(10, 11))]
    assert life.feed(Tokens(3, (12,))) == [TellTokens((12,), None)]


def test_an_answer_whose_continuation_fails_too_ends_with_an_error() -> None:
    life = make_life(*DECODING, lost(2), Placed(C2, D2), Prefilled(3, b"new", 12), KvArrived(4), Tokens(4, (13,)))

    assert life.feed(lost(4)) == [SendEnded(C2, None), TellFailed(LOST)]


def test_a_leg_that_failed_before_its_first_token_does_not_cost_the_answer_its_continuation() -> None:
    life = make_life(*MOVING, lost(2), Placed(None, D2), KvArrived(3), Tokens(3, (11,)))

    assert life.feed(lost(3))[-1] == Place((D, D2))
    assert life.feed(Placed(C2, D)) == [SubmitLeg(4, Phase.CONTEXT, C2, resumed=(10, 11))]


def test_no_turn_is_placed_more_than_three_times() -> None:
    life = make_life(*IN_CONTEXT, lost(1), Placed(C2, D), Prefilled(2, b"ref", 10), lost(3))

    assert life.feed(Placed(None, D2)) == [SubmitLeg(4, Phase.GENERATION, D2, kv_session=b"ref")]
    life.feed(Tokens(4, (11,)))
    assert life.feed(lost(4))[-1] == TellFailed(LOST)


def test_an_answer_that_was_complete_when_its_worker_died_is_not_made_longer() -> None:
    life = make_life(*DECODING, max_tokens=2)

    assert life.feed(lost(2))[-1] == TellFinished(FinishReason.LENGTH, Usage(3, 2, 2))


def test_an_answer_that_was_complete_is_not_failed_because_no_retry_is_left() -> None:
    continued = (*DECODING, lost(2), Placed(C2, D2), Prefilled(3, b"new", 12), KvArrived(4), Tokens(4, (13,)))
    refused = LegFailed(2, LOST, retryable=False)

    assert make_life(*continued, max_tokens=4).feed(lost(4))[-1] == TellFinished(FinishReason.LENGTH, Usage(3, 2, 4))
    assert make_life(*DECODING, max_tokens=2).feed(refused)[-1] == TellFinished(FinishReason.LENGTH, Usage(3, 2, 2))


@pytest.mark.parametrize(
    ("events", "leg", "cancels"),
    [(IN_CONTEXT, 1, []), (MOVING, 2, [CancelLeg(1)]), (DECODING, 2, []), (ALONE, 1, [])],
)
def test_a_refusal_that_would_be_the_same_elsewhere_is_told_at_once(
    events: tuple[Event, ...], leg: int, cancels: list[CancelLeg]
) -> None:
    refusal = EdgeError(Code.INVALID, "no such token")
    effects = make_life(*events).feed(LegFailed(leg, refusal, retryable=False))

    assert effects[-1] == TellFailed(refusal)
    assert [effect for effect in effects if isinstance(effect, CancelLeg)] == cancels


@pytest.mark.parametrize(
    ("events", "cancels"),
    [
        ((), []),
        (IN_CONTEXT, [CancelLeg(1)]),
        (MOVING, [CancelLeg(1), CancelLeg(2), SendEnded(C, None)]),
        (DECODING, [CancelLeg(2), SendEnded(C, None)]),
        (ALONE, [CancelLeg(1)]),
        ((*MOVING, lost(2)), [CancelLeg(1), SendEnded(C, None)]),
    ],
)
def test_a_caller_that_leaves_ends_both_legs_in_every_state(events: tuple[Event, ...], cancels: list[object]) -> None:
    assert make_life(*events).feed(CallerGone()) == cancels


def test_a_stop_string_ends_the_answer_and_says_so() -> None:
    assert make_life(*DECODING).feed(CallerStopped(FinishReason.TOOL_CALLS)) == [
        CancelLeg(2),
        SendEnded(C, FinishReason.TOOL_CALLS),
        TellFinished(FinishReason.TOOL_CALLS, Usage(3, 2, 2)),
    ]


def test_where_no_worker_can_be_found_the_caller_hears_that() -> None:
    overloaded = EdgeError(Code.OVERLOADED, "No context worker is ready.", retryable=True)

    assert make_life().feed(NotPlaced(overloaded)) == [TellFailed(overloaded)]
    assert make_life(*MOVING, lost(2)).feed(NotPlaced(overloaded)) == [
        CancelLeg(1),
        SendEnded(C, None),
        TellFailed(overloaded),
    ]


def test_every_state_but_the_last_has_a_deadline() -> None:
    assert [state for state in State if Deadlines().of(state) is None] == [State.DONE]


def test_a_silent_leg_is_cancelled_and_tried_elsewhere() -> None:
    assert make_life(*IN_CONTEXT).feed(DeadlinePassed(State.CONTEXT)) == [CancelLeg(1), Place((C,))]
    assert make_life(*MOVING).feed(DeadlinePassed(State.MOVING)) == [CancelLeg(2), Place((D,), generation_only=True)]
    assert make_life(*IN_CONTEXT).feed(DeadlinePassed(State.DECODING)) == [], "that state was left in time"


def test_a_search_for_workers_that_takes_too_long_fails_the_turn() -> None:
    [failed] = make_life().feed(DeadlinePassed(State.PLACING))

    assert isinstance(failed, TellFailed)
    assert failed.error.code is Code.TIMED_OUT


@pytest.mark.parametrize(
    ("events", "nonsense"),
    [
        (IN_CONTEXT, KvArrived(1)),
        (ALONE, Prefilled(1, b"ref", 10)),
        (MOVING, Prefilled(2, b"ref", 10)),
        (ALONE, KvArrived(1)),
    ],
)
def test_a_worker_that_speaks_out_of_turn_has_failed(
    events: tuple[Event, ...], nonsense: KvArrived | Prefilled
) -> None:
    cancel, *_, place = make_life(*events).feed(nonsense)

    assert cancel == CancelLeg(nonsense.leg)
    assert isinstance(place, Place)


def test_a_context_worker_that_repeats_itself_loses_its_pin_and_not_the_turn() -> None:
    life = make_life(*MOVING)

    assert life.feed(Prefilled(1, b"ref", 10)) == [CancelLeg(1)]
    assert life.feed(KvArrived(2)) == []
    assert life.feed(Tokens(2, (11,))) == [TellTokens((11,), None)]


def test_a_context_leg_that_ends_after_its_handoff_does_not_end_the_turn() -> None:
    assert make_life(*MOVING).feed(LegFinished(1, STOP)) == []


def test_placing_twice_is_a_broken_promise_of_ours() -> None:
    with pytest.raises(AssertionError, match="placed while context"):
        make_life(*IN_CONTEXT).feed(Placed(C, D))
