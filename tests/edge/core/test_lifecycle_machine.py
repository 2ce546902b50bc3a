"""Random lives against a naive account of what workers hold and what the caller heard.

A worker's n-th token of an answer is n, whoever makes it: so an answer is right when it counts from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
from edge.core.lifecycle import MAX_RETRIES, RequestLife
from edge.core.types import FinishReason, WorkerId

ERROR = EdgeError(Code.WORKER_FAILED, "lost", retryable=True)
WORKERS = [WorkerId(name) for name in "abcd"]
workers = st.sampled_from(WORKERS)
backs = st.integers(0, 3)
"""Which leg, counted back from the newest; beyond the first, there is none of that number."""


@dataclass
class Leg:
    """`held`: its worker holds something for it, as far as the edge can know."""

    order: SubmitLeg
    held: bool = True
    produced: int = 0

    @property
    def next_token(self) -> int:
        handed_over = 1 if self.order.phase is Phase.GENERATION else 0
        return len(self.order.resumed) + handed_over + self.produced


@dataclass
class Heard:
    tokens: list[int] = field(default_factory=list)
    starts: int = 0
    ends: int = 0


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.life = RequestLife(3)
        self.legs: dict[int, Leg] = {}
        self.heard = Heard()
        self.sought: Place | None = None
        self.places = 0
        self.failed: set[WorkerId] = set()
        self.tried_again: Counter[tuple[Phase, bool, bool]] = Counter()
        self.generating_at: set[WorkerId] = set()
        self.gone = False
        self.perform(self.life.begin())

    def feed(self, event: Event) -> list[object]:
        was_over = self.life.over
        effects: list[object] = list(self.life.feed(event))
        assert not (was_over and effects), f"{effects} after the end"
        self.perform(effects)
        return effects

    def perform(self, effects: Sequence[object]) -> None:
        for effect in effects:
            assert not self.heard.ends, f"{effect} after the caller was told the end"
            match effect:
                case Place():
                    assert self.sought is None
                    assert self.failed <= set(effect.avoid)
                    self.sought, self.places = effect, self.places + 1
                case SubmitLeg():
                    self.submit(effect)
                case CancelLeg():
                    assert self.legs[effect.leg].held, f"leg {effect.leg} is cancelled, and over"
                    self.legs[effect.leg].held = False
                case SendGenerating():
                    self.generating_at.add(effect.worker)
                case SendEnded():
                    self.generating_at.discard(effect.worker)
                case TellStarted():
                    self.heard.starts += 1
                case TellTokens():
                    self.heard.tokens += effect.token_ids
                case TellFinished():
                    assert effect.usage.completion_tokens == len(self.heard.tokens)
                    self.heard.ends += 1
                case TellFailed():
                    self.heard.ends += 1

    def submit(self, order: SubmitLeg) -> None:
        assert order.leg not in self.legs
        if order.phase is Phase.GENERATION:
            source = self.legs[int(order.kv_session)]
            assert source.held, "pages are offered that nobody pins"
            assert order.resumed == source.order.resumed
        else:
            assert list(order.resumed) == self.heard.tokens
            assert not any(leg.held for leg in self.legs.values()), "two prefills at once"
        self.legs[order.leg] = Leg(order)

    @precondition(lambda self: self.sought is not None and not self.life.over)
    @rule(context=st.none() | workers, generation=workers)
    def placed(self, context: WorkerId | None, generation: WorkerId) -> None:
        only = self.sought is not None and self.sought.generation_only
        self.sought = None
        self.feed(Placed(None if only or context == generation else context, generation))

    @precondition(lambda self: any(leg.held for leg in self.legs.values()))
    @rule(count=st.integers(1, 2))
    def goes_well(self, count: int) -> None:
        """The newest leg does what it was sent for."""
        newest = max(number for number, leg in self.legs.items() if leg.held)
        if self.legs[newest].order.phase is Phase.CONTEXT:
            self.prefilled(newest)
        elif count == 1:
            self.kv_arrived(newest)
        else:
            self.tokens(newest, count)

    @precondition(lambda self: any(leg.held for leg in self.legs.values()))
    @rule(newest=st.booleans(), retryable=st.sampled_from([True] * 7 + [False]))
    def goes_wrong(self, newest: bool, retryable: bool) -> None:
        held = [number for number, leg in self.legs.items() if leg.held]
        self.failed_leg(max(held) if newest else min(held), retryable)

    @rule(back=backs, what=st.sampled_from(["started", "prefilled", "kv_arrived", "tokens", "finished"]))
    def anything_is_said(self, back: int, what: str) -> None:
        """In turn or not, of a leg that lives or not."""
        if what != "finished" or back > 0:
            getattr(self, what)(max(self.legs, default=1) - back)

    def started(self, leg: int) -> None:
        self.feed(Started(leg, 1))

    def prefilled(self, leg: int) -> None:
        told = self.legs.get(leg)
        before = len(self.heard.tokens)
        self.feed(Prefilled(leg, str(leg).encode(), told.next_token if told else 99))
        if told is not None and len(self.heard.tokens) > before:
            told.produced += 1

    def kv_arrived(self, leg: int) -> None:
        before = self.life.state
        self.feed(KvArrived(leg))
        if before is State.MOVING and self.life.state is State.DECODING:
            self.let_go_of_pages()

    def tokens(self, leg: int, count: int = 2) -> None:
        told = self.legs.get(leg)
        first = told.next_token if told else 99
        before = len(self.heard.tokens)
        self.feed(Tokens(leg, range(first, first + count)))
        if told is not None and len(self.heard.tokens) > before:
            told.produced += count
            if self.generates(leg):
                self.let_go_of_pages()

    def let_go_of_pages(self) -> None:
        for leg in self.legs.values():
            if leg.order.phase is Phase.CONTEXT:
                leg.held = False

    def finished(self, leg: int) -> None:
        was_pin = self.life.state is State.MOVING and leg in self.life.legs and not self.generates(leg)
        self.over_at_its_worker(leg)
        self.feed(LegFinished(leg, FinishReason.STOP))
        assert not (was_pin and self.life.over), "the end of a handoff ended the turn"

    def failed_leg(self, leg: int, retryable: bool) -> None:
        told, sought = self.legs.get(leg), self.places
        if self.over_at_its_worker(leg) and told is not None:
            self.failed.add(told.order.worker)
        self.feed(LegFailed(leg, ERROR, retryable))
        if self.places > sought and told is not None:
            assert retryable
            self.tried_again[self.kind(told)] += 1

    def kind(self, leg: Leg) -> tuple[Phase, bool, bool]:
        """Also whether it produced, and whether it was sent pages that were offered before."""
        offered = [one.order.kv_session for one in self.legs.values() if one.order.leg < leg.order.leg]
        is_reused = leg.order.phase is Phase.GENERATION and leg.order.kv_session in offered
        return leg.order.phase, leg.produced > 0, is_reused and not leg.produced

    def generates(self, leg: int) -> bool:
        return self.legs[leg].order.phase is Phase.GENERATION

    def over_at_its_worker(self, leg: int) -> bool:
        told = self.legs.get(leg)
        was_held = told is not None and told.held
        if told is not None:
            told.held = False
        return was_held

    @rule(state=st.sampled_from(State), chance=st.integers(0, 3))
    def a_deadline_passes(self, state: State, chance: int) -> None:
        if chance == 0:
            self.deadline(state)

    def deadline(self, state: State) -> None:
        late = [leg for leg in self.legs.values() if leg.held and leg.order.phase is not Phase.CONTEXT] or [
            leg for leg in self.legs.values() if leg.held
        ]
        sought = self.places
        self.feed(DeadlinePassed(state))
        if self.places > sought:
            [leg] = [leg for leg in late if not leg.held]
            self.failed.add(leg.order.worker)
            self.tried_again[self.kind(leg)] += 1

    @rule(chance=st.integers(0, 15))
    def it_ends_early(self, chance: int) -> None:
        if chance == 0 and self.sought is not None and not self.life.over:
            self.feed(NotPlaced(ERROR))
        elif chance == 1:
            self.feed(CallerStopped(FinishReason.STOP))
        elif chance == 2:
            self.gone = self.gone or not self.life.over
            assert not any(isinstance(one, TellFinished | TellFailed) for one in self.feed(CallerGone()))

    @invariant()
    def the_answer_counts_from_zero(self) -> None:
        assert self.heard.tokens == list(range(len(self.heard.tokens)))
        assert self.heard.tokens == self.life.sent

    @invariant()
    def nothing_is_tried_too_often(self) -> None:
        assert self.places <= 1 + MAX_RETRIES
        assert all(count == 1 for count in self.tried_again.values())
        assert self.heard.starts <= 1

    @invariant()
    def what_workers_hold_is_what_the_turn_knows(self) -> None:
        assert {number for number, leg in self.legs.items() if leg.held} == set(self.life.legs)

    @invariant()
    def the_end_is_told_once_and_leaves_nothing(self) -> None:
        assert self.heard.ends == (1 if self.life.over and not self.gone else 0)
        if self.life.over:
            assert not self.life.legs
            assert not self.generating_at

    def teardown(self) -> None:
        """Whatever state it was left in, deadlines alone end it."""
        for _ in range(3 * (1 + MAX_RETRIES)):
            if self.sought is not None and not self.life.over:
                self.placed(WORKERS[0], WORKERS[1])
            self.deadline(self.life.state)
        assert self.life.over


Lives.TestCase.settings = settings(max_examples=500, stateful_step_count=25, deadline=None)
TestLives = Lives.TestCase
