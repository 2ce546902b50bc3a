"""One turn's life.

    PLACING --Placed--> CONTEXT --Prefilled--> MOVING --KvArrived--> DECODING --LegFinished--> DONE
                        ALONE --Tokens--> DECODING          (one worker for both phases)

A leg that fails before its own first token is tried once more, on another worker: a generation leg with the same
reference while the pages are pinned, else by prefilling the prompt and what was already sent. A reference may be tried
that is worth nothing any more, since a worker that died had fetched its pages: then too the prompt is prefilled. After
its first token the answer goes on from the tokens already sent, once. Every other failure is the caller's to see.
Whoever ends a turn early ends both legs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from edge.core.errors import Code, EdgeError
from edge.core.life_events import (
    CallerGone,
    CallerStopped,
    CancelLeg,
    DeadlinePassed,
    Effect,
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
from edge.core.types import FinishReason, TokenLogprob, Usage, WorkerId

MAX_RETRIES = 2
LegEvent: TypeAlias = Started | Prefilled | KvArrived | Tokens | LegFinished | LegFailed
STATE_OF_LEG = {
    Phase.CONTEXT: State.CONTEXT,
    Phase.GENERATION: State.MOVING,
    Phase.AGGREGATED: State.ALONE,
}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that each state may take; `token_s` from one token to the next."""

    queue_s: float = 300.0
    move_s: float = 30.0
    token_s: float = 60.0

    def of(self, state: State) -> float | None:
        """None where nothing more is awaited."""
        match state:
            case State.PLACING | State.CONTEXT | State.ALONE:
                return self.queue_s
            case State.MOVING:
                return self.move_s
            case State.DECODING:
                return self.token_s
            case State.DONE:
                return None


@dataclass(slots=True)
class _Leg:
    phase: Phase
    worker: WorkerId
    is_reused: bool = False
    produced: int = 0

    @property
    def kind(self) -> str:
        """Of each kind one may fail."""
        if self.produced:
            return f"{self.phase} later"
        return f"{self.phase} reused" if self.is_reused else f"{self.phase} first"


@dataclass(slots=True)
class RequestLife:
    """Feed it what happens; it answers with what to do, in order. Events of legs that are over are ignored.

    `max_tokens`: how long the answer may get, None where only its workers know. `sent`: every token the caller was
    told, in order. `legs`: those that a worker may still hold something for.
    """

    prompt_tokens: int
    max_tokens: int | None = None
    state: State = State.PLACING
    sent: list[int] = field(default_factory=list)
    legs: dict[int, _Leg] = field(default_factory=dict)
    _next_leg: int = 1
    _generation: WorkerId | None = None
    _kv_session: bytes = b""
    _is_offered: bool = False
    _pinned_leg: int | None = None
    _prefilled_by: WorkerId | None = None
    _failed: list[WorkerId] = field(default_factory=list)
    _retries: set[str] = field(default_factory=set)
    _cached_tokens: int | None = None

    def begin(self) -> list[Effect]:
        return [Place(())]

    @property
    def over(self) -> bool:
        return self.state is State.DONE

    def feed(self, event: Event) -> list[Effect]:
        if self.state is State.DONE:
            return []
        match event:
            case Placed():
                return self._placed(event)
            case NotPlaced():
                return self._fail(event.error)
            case CallerStopped():
                return self._finish(event.reason)
            case CallerGone():
                return self._end(None)
            case DeadlinePassed():
                return self._late(event)
            case Started() | Prefilled() | KvArrived() | Tokens() | LegFinished() | LegFailed():
                leg = self.legs.get(event.leg)
                return [] if leg is None else self._of_leg(leg, event)

    def _of_leg(self, leg: _Leg, event: LegEvent) -> list[Effect]:
        is_pinned = event.leg == self._pinned_leg
        match event, leg.phase:
            case Started(), Phase.CONTEXT | Phase.AGGREGATED:
                return self._started(event)
            case Started(), Phase.GENERATION:
                return []
            case Prefilled(), Phase.CONTEXT if self.state is State.CONTEXT:
                return self._prefilled(leg, event)
            case KvArrived(), _ if is_pinned or leg.phase is Phase.GENERATION:
                return self._arrived()
            case Tokens(), _ if not is_pinned:
                return self._tokens(leg, event)
            case LegFinished() | LegFailed(), _ if is_pinned:
                return self._unpinned(leg, event.leg)
            case LegFinished(), _:
                del self.legs[event.leg]
                return self._finish(event.reason)
            case LegFailed(), _:
                return self._leg_failed(leg, event)
            case _:
                error = EdgeError(Code.WORKER_FAILED, "A worker spoke out of turn.", retryable=True)
                return self._give_up(event.leg, error)

    def _placed(self, event: Placed) -> list[Effect]:
        assert self.state is State.PLACING, f"placed while {self.state}"
        self._generation = event.generation
        if self._kv_session:
            return [self._submit(Phase.GENERATION, event.generation)]
        if event.context is None:
            return [self._submit(Phase.AGGREGATED, event.generation)]
        return [self._submit(Phase.CONTEXT, event.context)]

    def _submit(self, phase: Phase, worker: WorkerId) -> SubmitLeg:
        number = self._next_leg
        self._next_leg += 1
        is_handoff = phase is Phase.GENERATION
        self.legs[number] = _Leg(phase, worker, is_reused=is_handoff and self._is_offered)
        self._is_offered = is_handoff
        self.state = STATE_OF_LEG[phase]
        # A generation leg's first token is in its reference; what a prefill must know stands behind its prompt.
        resumed = tuple(self.sent[:-1]) if is_handoff else tuple(self.sent)
        return SubmitLeg(number, phase, worker, resumed, self._kv_session if is_handoff else b"")

    def _started(self, event: Started) -> list[Effect]:
        """Only the first prefill's hits are the caller's: a second attempt would find the first one's."""
        if self._cached_tokens is not None:
            return []
        self._cached_tokens = event.cached_tokens
        return [TellStarted(event.cached_tokens)]

    def _prefilled(self, leg: _Leg, event: Prefilled) -> list[Effect]:
        self._kv_session, self._pinned_leg = event.kv_session, event.leg
        self._prefilled_by = leg.worker
        assert self._generation is not None
        told = self._tell((event.token_id,), None if event.logprob is None else (event.logprob,))
        # Told last of all but the leg: the caller may end the turn as it hears its first token.
        return [SendGenerating(leg.worker), told, self._submit(Phase.GENERATION, self._generation)]

    def _arrived(self) -> list[Effect]:
        """The generation side has its pages; the worker that had them has let go."""
        if self.state is State.MOVING:
            if self._pinned_leg is not None:
                del self.legs[self._pinned_leg]
                self._pinned_leg = None
            self._kv_session = b""
            self.state = State.DECODING
        return []

    def _unpinned(self, leg: _Leg, number: int) -> list[Effect]:
        """The pages are gone; whether the pull made it in time, its own leg will tell."""
        del self.legs[number]
        self._pinned_leg = None
        self._kv_session = b""
        self._failed.append(leg.worker)
        if self.state is not State.PLACING:
            return []
        self._prefilled_by = None
        return [SendEnded(leg.worker, None)]

    def _tokens(self, leg: _Leg, event: Tokens) -> list[Effect]:
        leg.produced += len(event.token_ids)
        if leg.phase is Phase.GENERATION:
            self._arrived()
        else:
            self._prefilled_by = leg.worker
        self.state = State.DECODING
        return [self._tell(event.token_ids, event.logprobs)]

    def _tell(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> TellTokens:
        self.sent.extend(token_ids)
        return TellTokens(token_ids, logprobs)

    def _leg_failed(self, leg: _Leg, event: LegFailed) -> list[Effect]:
        del self.legs[event.leg]
        self._failed.append(leg.worker)
        if self.max_tokens is not None and len(self.sent) >= self.max_tokens:
            return self._finish(FinishReason.LENGTH)
        # Where its pages are gone, a leg would fail again; the turn need not.
        is_retryable = event.retryable or event.error.code is Code.KV_SESSION_NOT_FOUND
        if not is_retryable or leg.kind in self._retries or len(self._retries) >= MAX_RETRIES:
            return self._fail(event.error)
        self._retries.add(leg.kind)
        return self._again(leg)

    def _again(self, failed: _Leg) -> list[Effect]:
        """Place what is left of the turn elsewhere."""
        self.state = State.PLACING
        if self._kv_session and not failed.is_reused:
            return [Place(tuple(self._failed), generation_only=True)]
        return [*self._end_legs(None), Place(tuple(self._failed))]

    def _late(self, event: DeadlinePassed) -> list[Effect]:
        if event.state is not self.state:
            return []
        error = EdgeError(Code.TIMED_OUT, f"The worker was silent for too long ({self.state}).", retryable=True)
        late = [number for number in self.legs if number != self._pinned_leg]
        return self._give_up(late[0], error) if late else self._fail(error)

    def _give_up(self, number: int, error: EdgeError) -> list[Effect]:
        """A leg of ours that its worker does not know has failed."""
        if number == self._pinned_leg:
            return [CancelLeg(number), *self._unpinned(self.legs[number], number)]
        return [CancelLeg(number), *self._leg_failed(self.legs[number], LegFailed(number, error, retryable=True))]

    def _finish(self, reason: FinishReason) -> list[Effect]:
        usage = Usage(self.prompt_tokens, self._cached_tokens or 0, len(self.sent))
        return [*self._end(reason), TellFinished(reason, usage)]

    def _fail(self, error: EdgeError) -> list[Effect]:
        return [*self._end(None), TellFailed(error)]

    def _end(self, reason: FinishReason | None) -> list[Effect]:
        self.state = State.DONE
        return self._end_legs(reason)

    def _end_legs(self, reason: FinishReason | None) -> list[Effect]:
        effects: list[Effect] = [CancelLeg(number) for number in sorted(self.legs)]
        if self._prefilled_by is not None:
            effects.append(SendEnded(self._prefilled_by, reason))
        self.legs = {}
        self._pinned_leg, self._kv_session, self._prefilled_by = None, b"", None
        return effects
