"""What happens to a turn, and what it asks for: the events and effects of `edge.core.lifecycle`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edge.core.errors import EdgeError
from edge.core.types import FinishReason, TokenLogprob, Usage, WorkerId


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
class SendGenerating:
    """Tell the worker of the context leg: this conversation's answer is being made elsewhere."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class SendEnded:
    """Tell the worker that prefilled: the answer is over. `reason` None: it failed, or nobody waited for it."""

    worker: WorkerId
    reason: FinishReason | None


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


Effect: TypeAlias = (
    Place | SubmitLeg | CancelLeg | SendGenerating | SendEnded | TellStarted | TellTokens | TellFinished | TellFailed
)
