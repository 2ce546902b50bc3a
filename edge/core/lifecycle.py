"""One turn's life.

    PLACING --Placed--> CONTEXT --Prefilled--> MOVING --KvArrived--> DECODING --LegFinished--> DONE
                        ALONE --Started--> DECODING         (one worker for both phases)

A leg that fails before its own first token is tried once more, on another worker: a generation leg with the same
reference while the pages are pinned, else by prefilling the prompt and what was already sent. After its first token the
answer goes on from the tokens already sent, once. Every other failure is the caller's to see. Whoever ends a turn early
ends both legs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from edge.core.errors import Code, EdgeError
from edge.core.types import FinishReason, TokenLogprob, Usage, WorkerId

MAX_RETRIES = 2


class State(enum.StrEnum):
    PLACING = "placing"
    CONTEXT = "context"
    MOVING = "moving"
    ALONE = "alone"
    DECODING = "decoding"
    DONE = "done"


class Phase(enum.StrEnum):
    CONTEXT = "context"
    GENERATION = "generation"
    AGGREGATED = "aggregated"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that each state may take; `token_s` from one token to the next."""

    queue_s: float = 300.0
    move_s: float = 30.0
    token_s: float = 60.0

    def of(self, state: State) -> float | None:
        match state:
            case State.CONTEXT | State.ALONE:
                return self.queue_s
            case State.MOVING:
                return self.move_s
            case State.DECODING:
                return self.token_s
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Placed:
    """Where it runs. `context` None: `generation` does both phases."""

    context: WorkerId | None
    generation: WorkerId


@dataclass(frozen=True, slots=True)
class NotPlaced:
    error: EdgeError


@dataclass(frozen=True, slots=True)
class Started:
    """The leg left its worker's queue."""

    leg: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A context leg is done: its pages wait under `kv_session`, for whoever has it."""

    leg: int
    kv_session: bytes
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class KvArrived:
    leg: int


@dataclass(frozen=True, slots=True)
class Tokens:
    leg: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class LegFinished:
    leg: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class LegFailed:
    """`retryable`: another worker, or this one later, may succeed."""

    leg: int
    error: EdgeError
    retryable: bool


@dataclass(frozen=True, slots=True)
class CallerStopped:
    """The edge itself ended the answer: a stop string, a tool call."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class CallerGone:
    """Nobody listens any more."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    state: State


Event: TypeAlias = (
    Placed
    | NotPlaced
    | Started
    | Prefilled
    | KvArrived
    | Tokens
    | LegFinished
    | LegFailed
    | CallerStopped
    | CallerGone
    | DeadlinePassed
)


@dataclass(frozen=True, slots=True)
class Place:
    """Choose workers, none of `avoid` where that can be; answer with Placed or NotPlaced.

    `generation_only`: the pages wait on a context worker, so only a generation worker is wanted.
    """

    avoid: tuple[WorkerId, ...]
    generation_only: bool = False


@dataclass(frozen=True, slots=True)
class SubmitLeg:
    """Send leg number `leg`, as a new request id. `resumed`: tokens already produced, to stand behind the prompt."""

    leg: int
    phase: Phase
    worker: WorkerId
    resumed: tuple[int, ...] = ()
    kv_session: bytes = b""


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Also ends the pin of a context leg."""

    leg: int


@dataclass(frozen=True, slots=True)
class TellStarted:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TellTokens:
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class TellFinished:
    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class TellFailed:
    error: EdgeError


Effect: TypeAlias = Place | SubmitLeg | CancelLeg | TellStarted | TellTokens | TellFinished | TellFailed


@dataclass(slots=True)
class _Leg:
    phase: Phase
    worker: WorkerId
    produced: int = 0


@dataclass(slots=True)
class RequestLife:
    """Feed it what happens; it answers with what to do, in order. Events of legs that are over are ignored.

    `sent`: every token the caller was told, in order.
    """

    prompt_tokens: int
    state: State = State.PLACING
    sent: list[int] = field(default_factory=list)
    legs: dict[int, _Leg] = field(default_factory=dict)
    _next_leg: int = 1
    _generation: WorkerId | None = None
    _kv_session: bytes = b""
    _pinned_leg: int | None = None
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
                return self._end()
            case DeadlinePassed():
                return self._late(event)
            case Started() | Prefilled() | KvArrived() | Tokens() | LegFinished() | LegFailed():
                leg = self.legs.get(event.leg)
                return [] if leg is None else self._of_leg(leg, event)

    def _of_leg(
        self, leg: _Leg, event: Started | Prefilled | KvArrived | Tokens | LegFinished | LegFailed
    ) -> list[Effect]:
        match event:
            case Started():
                return self._started(leg, event)
            case Prefilled():
                return self._prefilled(leg, event)
            case KvArrived():
                return self._arrived()
            case Tokens():
                return self._tokens(leg, event)
            case LegFinished():
                del self.legs[event.leg]
                return self._finish(event.reason)
            case LegFailed():
                return self._leg_failed(leg, event)

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
        self.legs[number] = _Leg(phase, worker)
        self.state = {
            Phase.CONTEXT: State.CONTEXT,
            Phase.GENERATION: State.MOVING,
            Phase.AGGREGATED: State.ALONE,
        }[phase]
        # A generation leg's first token is in its reference; what a prefill must know stands behind its prompt.
        resumed = tuple(self.sent) if phase is not Phase.GENERATION else tuple(self.sent[:-1])
        return SubmitLeg(number, phase, worker, resumed, self._kv_session if phase is Phase.GENERATION else b"")

    def _started(self, leg: _Leg, event: Started) -> list[Effect]:
        if leg.phase is Phase.GENERATION or self._cached_tokens is not None:
            return []
        self._cached_tokens = event.cached_tokens
        return [TellStarted(event.cached_tokens)]

    def _prefilled(self, leg: _Leg, event: Prefilled) -> list[Effect]:
        assert self.state is State.CONTEXT, f"prefilled while {self.state}"
        leg.produced += 1
        self._kv_session, self._pinned_leg = event.kv_session, event.leg
        assert self._generation is not None
        told = self._tell((event.token_id,), None if event.logprob is None else (event.logprob,))
        return [told, self._submit(Phase.GENERATION, self._generation)]

    def _arrived(self) -> list[Effect]:
        """The generation side has its pages; the worker that had them has let go."""
        if self._pinned_leg is not None:
            self.legs.pop(self._pinned_leg, None)
            self._pinned_leg = None
        self._kv_session = b""
        self.state = State.DECODING
        return []

    def _tokens(self, leg: _Leg, event: Tokens) -> list[Effect]:
        leg.produced += len(event.token_ids)
        self.state = State.DECODING
        return [self._tell(event.token_ids, event.logprobs)]

    def _tell(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> TellTokens:
        self.sent.extend(token_ids)
        return TellTokens(token_ids, logprobs)

    def _leg_failed(self, leg: _Leg, event: LegFailed) -> list[Effect]:
        number = event.leg
        del self.legs[number]
        if number == self._pinned_leg:
            # The pages are gone with their worker; whether the pull made it in time, its own leg will tell.
            self._pinned_leg = None
            self._kv_session = b""
            return []
        self._failed.append(leg.worker)
        kind = f"{leg.phase} {'later' if leg.produced else 'first'}"
        if not event.retryable or kind in self._retries or len(self._retries) >= MAX_RETRIES:
            return self._fail(event.error)
        self._retries.add(kind)
        return self._again()

    def _again(self) -> list[Effect]:
        """Place what is left of the turn elsewhere."""
        self.state = State.PLACING
        keep = self._pinned_leg if self._kv_session else None
        effects: list[Effect] = [CancelLeg(number) for number in sorted(self.legs) if number != keep]
        self.legs = {number: leg for number, leg in self.legs.items() if number == keep}
        return [*effects, Place(tuple(self._failed), generation_only=bool(self._kv_session))]

    def _late(self, event: DeadlinePassed) -> list[Effect]:
        if event.state is not self.state:
            return []
        late = [number for number, leg in self.legs.items() if number != self._pinned_leg]
        error = EdgeError(Code.TIMED_OUT, f"The worker was silent for too long ({self.state}).", retryable=True)
        if not late:
            return self._fail(error)
        number = late[-1]
        return [CancelLeg(number), *self._leg_failed(self.legs[number], LegFailed(number, error, retryable=True))]

    def _finish(self, reason: FinishReason) -> list[Effect]:
        usage = Usage(self.prompt_tokens, self._cached_tokens or 0, len(self.sent))
        return [*self._end(), TellFinished(reason, usage)]

    def _fail(self, error: EdgeError) -> list[Effect]:
        return [*self._end(), TellFailed(error)]

    def _end(self) -> list[Effect]:
        cancels: list[Effect] = [CancelLeg(number) for number in sorted(self.legs)]
        self.legs = {}
        self.state = State.DONE
        return cancels
