"""What the event loop and the transfer threads tell the engine thread of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from worker.copy_board import CopyResult
from worker.core.conversations import News, StopReason
from worker.core.events import Stored
from worker.core.outputs import Output
from worker.core.replica import Replica
from worker.core.types import Request, RequestKey
from worker.refusal import Refused


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Also ends the pin of a context leg that has answered."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Pulled:
    """Every rank is done with a pull; `why` is None where all pages arrived."""

    key: RequestKey
    why: str | None


@dataclass(frozen=True, slots=True)
class Copied:
    """Every rank is done with a copy between tiers."""

    result: CopyResult


@dataclass(frozen=True, slots=True)
class Released:
    """The generation worker has the pages of this context leg."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Heard:
    """What an edge told of a conversation. `final`: its last request was its last one."""

    conversation: str
    news: News
    reason: StopReason = StopReason.UNKNOWN
    final: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """Another worker serves this turn of the conversation, says an edge."""

    conversation: str
    turn: str


@dataclass(frozen=True, slots=True)
class Check:
    """Ask every rank what it holds; `answer` is called on the engine or control thread."""

    answer: Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Forget every block that no request holds: of the salt `tenant`; of the conversation `family` and its descendants;
    or, with neither, all. `answer` is called on the engine thread once the next plan will."""

    answer: Callable[[], None]
    tenant: bytes | None = None
    family: str | None = None


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask rank 0's replica, between steps: `question` changes nothing, and `answer` gets what it said. Both are called
    on the engine thread."""

    question: Callable[[Replica], Any]
    answer: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class TakeKvSnapshot:
    """Say what the cache holds now. The answer is a `KvSnapshot` with this ticket, in order with the steps' events."""

    ticket: int


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """The other way: all that the cache held after the events of the steps before. Parents come before children."""

    ticket: int
    stored: Sequence[Stored]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine thread."""


@dataclass(frozen=True, slots=True)
class PinEnded:
    """The other way: a context leg's pages are no longer pinned, for whatever reason."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Rejected:
    """The other way: the scheduler did not take this request."""

    key: RequestKey
    refused: Refused


Command: TypeAlias = (
    Submit
    | Cancel
    | Copied
    | Pulled
    | Released
    | Heard
    | Returned
    | Check
    | ClearCache
    | Inspect
    | TakeKvSnapshot
    | Stop
)
Told: TypeAlias = Output | PinEnded | Rejected
