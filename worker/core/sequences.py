"""What a rank knows of one running request."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np

from worker.core.arrays import EMPTY, Growing, Int32s
from worker.core.runs import Hold
from worker.core.stretches import Terms
from worker.core.types import PageId, RequestKey

Worth = tuple[int, int, int]
"""From which block on, with which priority, for how many ms after it was let go (0: for ever)."""


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` begins at position `base`, behind what was matched; `pages` at position 0.

    `computed`: positions whose K and V are in memory, those of the running step included. `committed`: its blocks that
    the tree has, all of them kept by `hold`. `commit_until`: blocks ending behind this position are never committed.
    `loading`: some of its blocks are not on the device yet, and `pages` is not to be read. `pinned`: another worker may
    be reading its pages, so those that a commit replaces wait as `spare` till its release. `copy_from`: a page whose
    content its first page starts with, until that one is taken. `prefills`: its prompt is not done yet, and its
    conversation waits to hear of it. `returns`: its first chunk is a return of its conversation. `worth`: its blocks'
    priorities, by rising first block. `extends`: it has added a block behind what it found last.
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
    owner: str = ""
    prefills: bool = False
    returns: bool = False
    loading: bool = False
    copy_from: PageId | None = None
    pinned: bool = False
    extends: bool = False
    worth: Ordered[Worth] = ()
    spare: Growing = field(default_factory=lambda: Growing.on(EMPTY))

    @property
    def length(self) -> int:
        """Tokens known so far, the last sampled one included."""
        return self.base + self.tokens.size

    @property
    def tokens_left(self) -> int:
        """Known tokens that are not computed yet."""
        return self.length - self.computed

    def token_slice(self, start: int, stop: int) -> Int32s:
        return self.tokens.view[start - self.base : stop - self.base]

    def terms(self, start: int, stop: int, born: int) -> list[tuple[int, Terms]]:
        """How its blocks [start, stop) are kept: how many each time, and on which terms."""
        if not self.worth:
            return [(stop - start, Terms(self.owner, born=born))]
        terms: list[tuple[int, Terms]] = []
        ends = [*(first for first, _, _ in self.worth[1:]), stop]
        if self.worth[0][0] > start:
            terms.append((min(stop, self.worth[0][0]) - start, Terms(self.owner, born=born)))
        for (first, priority, duration_ms), end in zip(self.worth, ends, strict=True):
            count = min(stop, end) - max(start, first)
            if count > 0:
                terms.append((count, Terms(self.owner, priority, duration_ms, born=born)))
        return terms

    def pages_needed(self, until: int, block: int) -> int:
        """How many more pages hold positions [0, until)."""
        return max(0, -(-until // block) - self.pages.size)

    def slots(self, start: int, stop: int, block: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where positions [start, stop) are kept: page * block + offset."""
        positions = np.arange(start, stop)
        return self.pages.view[positions // block].astype(np.int64) * block + positions % block
