"""What a step tells the outside. Everything is about one request; a terminal output comes last, once.

Started, TokenOut…, Finished            a whole answer
Started, HandoffReady                   a context leg; its pages stay pinned
Started, KvArrived, TokenOut…, Finished a generation leg
Failed                                  in place of whatever was still to come
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from worker.core.types import FinishReason, Logprobs, RequestKey


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not taken; `code` is OpenEngine's ErrorCode without its prefix."""

    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Started:
    """It left the queue. `cached_tokens`: prompt tokens in whole blocks that this worker need not compute again."""

    key: RequestKey
    cached_tokens: int


class TokenOut(msgspec.Struct, frozen=True, gc=False):
    """There are many: no dataclass is made as fast."""

    key: RequestKey
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class HandoffReady:
    """A context leg's prompt is prefilled and its pages are pinned until they are released, cancelled or expired."""

    key: RequestKey
    first_token: int
    logprobs: Logprobs | None
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """A generation leg has all its pages; the source may let go of them."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Finished:
    """`stop_token_id`: which token stopped it, where one did."""

    key: RequestKey
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """`code`: OpenEngine's ErrorCode without its prefix. `retryable`: the same request may succeed later."""

    key: RequestKey
    code: str
    message: str
    retryable: bool


Output: TypeAlias = Started | TokenOut | HandoffReady | KvArrived | Finished | Failed


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """`used_pages` are those that some request holds; pages that hold only reusable blocks are not used. `suspended`:
    those of the queued that have run before."""

    running: int
    queued: int
    queued_tokens: int
    used_pages: int
    total_pages: int
    suspended: int = 0
