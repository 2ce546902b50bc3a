"""What a rank knows of one running request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from worker.core.arrays import Growing, Int32s
from worker.core.runs import Hold
from worker.core.types import PageId, RequestKey

NO_PAGES = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` begins at position `base`, behind what was matched; `pages` at position 0.

    `computed`: positions whose K and V are in memory, those of the running step included. `committed`: its blocks that
    the tree has, all of them kept by `hold`. `commit_until`: blocks ending behind this position are never committed.
    `pinned`: another worker may be reading its pages, so those that a commit replaces wait as `spare` till its release.
    `copy_from`: a page whose content its first page starts with, until that one is taken. `prefills`: its prompt is not
    done yet, and its conversation waits to hear of it.
    """

    key: RequestKey
    hold: Hold
    base: int
    tokens: Growing
    pages: Growing
    commit_until: int
    computed: int
    committed: int
    conversation: str = ""
    prefills: bool = False
    copy_from: PageId | None = None
    pinned: bool = False
    spare: Growing = field(default_factory=lambda: Growing(NO_PAGES))

    @property
    def length(self) -> int:
        """Tokens known so far, the last sampled one included."""
        return self.base + self.tokens.size

    def token_slice(self, start: int, stop: int) -> Int32s:
        return self.tokens.view[start - self.base : stop - self.base]

    def pages_needed(self, until: int, block: int) -> int:
        """How many more pages hold positions [0, until)."""
        return max(0, -(-until // block) - self.pages.size)

    def slots(self, start: int, stop: int, block: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where positions [start, stop) are kept: page * block + offset."""
        positions = np.arange(start, stop)
        return self.pages.view[positions // block].astype(np.int64) * block + positions % block
