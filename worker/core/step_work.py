"""What one plan asks of a rank besides its own bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from worker.core.arrays import EMPTY, Int32s
from worker.core.events import CacheEvent
from worker.core.tiers import CopyWork
from worker.core.types import Batch, RequestKey


@dataclass(frozen=True, slots=True)
class PullWork:
    """Fill `pages` with blocks `first_block` and following of the session `source`."""

    request: RequestKey
    source: bytes
    first_block: int
    pages: Int32s


@dataclass(frozen=True, slots=True)
class PinWork:
    """From the end of this step's forward, `pages` hold the first `num_tokens` tokens of this request for whoever
    presents its session's secret."""

    request: RequestKey
    pages: Int32s
    num_tokens: int


@dataclass(slots=True)
class StepWork:
    """What one plan asks of a rank besides its own bookkeeping. `unpins`: these pins are over.

    `copies`: between tiers, in this order; whatever else the step writes to a page that one of them reads is written
    behind it. `events`: what changed in the cache, for those who follow it.
    """

    batch: Batch | None = None
    pulls: list[PullWork] = field(default_factory=list)
    pins: list[PinWork] = field(default_factory=list)
    unpins: list[RequestKey] = field(default_factory=list)
    copies: list[CopyWork] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)

    def written_pages(self, block: int) -> Int32s:
        """Pages of the device that the step itself or its pulls write to."""
        parts = [pull.pages for pull in self.pulls]
        if self.batch is not None:
            parts.append(np.unique(self.batch.slots // block).astype(np.int32))
            parts.append(np.array([target for _, target in self.batch.page_copies], np.int32))
        return np.concatenate(parts) if parts else EMPTY
