"""What rank 0 knows of one request beyond what every rank does."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from worker.core.types import FinishReason, Phase, Request, TokenIds


class Stage(enum.Enum):
    """QUEUED --admitted--> PREFILL or PULLING --> DECODING --> over; a context leg goes to PINNED instead.

    LOADING comes between where cached blocks come back from colder tiers, or a pull has not all its pages yet. QUEUED
    again when it is suspended. DOOMED: cancelled or lost in the middle of a pull, whose pages are still written.
    """

    QUEUED = enum.auto()
    LOADING = enum.auto()
    PREFILL = enum.auto()
    PULLING = enum.auto()
    DECODING = enum.auto()
    PINNED = enum.auto()
    DOOMED = enum.auto()


@dataclass(slots=True, eq=False)
class Live:
    """`output`: tokens generated so far, those of an earlier attempt included. `age`: smaller is older; 0 before it is
    admitted for the first time.

    `started`: it left the queue, `announced`: the outside has heard of it. `pulled`: its pull has begun. `returns`: its
    first chunk, still to come, is a return of its conversation, though it made way meanwhile.
    `pinned_until_ms`: when a context leg's pages expire.
    """

    request: Request
    age: int = 0
    stage: Stage = Stage.QUEUED
    output: list[int] = field(default_factory=list)
    started: bool = False
    announced: bool = False
    pulled: bool = False
    returns: bool = False
    cached_tokens: int = 0
    pinned_until_ms: int = 0

    def __post_init__(self) -> None:
        request = self.request
        if request.resumed_tokens:
            self.output = request.token_ids[-request.resumed_tokens :].tolist()
        if request.first_token is not None:
            self.output.append(request.first_token)

    @property
    def tokens(self) -> TokenIds:
        """Everything known: the prompt, and what was generated behind it."""
        behind = self.output[self.request.resumed_tokens :]
        return (
            np.concatenate([self.request.token_ids, np.array(behind, np.int32)]) if behind else self.request.token_ids
        )

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        return len(self.request.token_ids) + len(self.output) - self.request.resumed_tokens

    @property
    def pulls(self) -> bool:
        """It takes its pages from another worker; not after it was suspended, when it prefills like any other."""
        return self.request.phase is Phase.GENERATION and not self.pulled

    @property
    def may_step(self) -> bool:
        return self.stage in (Stage.PREFILL, Stage.DECODING)

    @property
    def is_running(self) -> bool:
        """It has pages, and is neither done nor given up."""
        return self.stage in (Stage.LOADING, Stage.PREFILL, Stage.DECODING, Stage.PULLING)

    def of_answer(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Those of these tokens, the next ones, that come before its end, and the one that ends it."""
        stopping, had = self.request.stopping, len(self.output)
        count = min(len(token_ids), max(1, stopping.max_tokens - had))
        if stopping.stop_token_ids:
            may_stop = range(max(0, stopping.min_tokens - had), count)
            count = next((at + 1 for at in may_stop if token_ids[at] in stopping.stop_token_ids), count)
        return token_ids[:count]

    def ending(self) -> tuple[FinishReason, int | None] | None:
        """Why the answer ends with the last token of `output`, and which token stopped it."""
        stopping = self.request.stopping
        count = len(self.output)
        if count > stopping.min_tokens and self.output[-1] in stopping.stop_token_ids:
            return FinishReason.STOP, self.output[-1]
        if count >= stopping.max_tokens:
            return FinishReason.LENGTH, None
        return None
