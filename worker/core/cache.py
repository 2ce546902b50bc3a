"""The pages of one rank's device: free ones, those that running requests fill, and those of committed blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.core.arrays import Int32s
from worker.core.runs import EMPTY, NOTHING, Match, RunTree
from worker.core.sequences import Sequence


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`num_pages` is agreed by all ranks. `enable_block_reuse` False: nothing is committed."""

    num_pages: int
    tokens_per_block: int
    enable_block_reuse: bool = True


class Cache:
    """Takes and gives pages, all or none; commits what is full; evicts what nobody holds."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.tree = RunTree(config.tokens_per_block)
        self._free = list(range(config.num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that `take` could give now."""
        return len(self._free) + self.tree.num_idle

    @property
    def num_in_use(self) -> int:
        """Pages that some request holds."""
        return self.config.num_pages - self.num_available

    def match(self, scope: bytes, tokens: Int32s, max_blocks: int) -> Match:
        return self.tree.match(scope, tokens, max_blocks) if self.config.enable_block_reuse else NOTHING

    def take(self, count: int) -> tuple[Int32s, Int32s] | None:
        """`count` pages, all or none, and which of them were evicted for it. None: the caller must wait or let go."""
        if count > self.num_available:
            return None
        missing = count - len(self._free)
        evicted = self.tree.evict(missing) if missing > 0 else EMPTY
        self.give(evicted)
        taken = np.array(self._free[len(self._free) - count :][::-1], np.int32)
        del self._free[len(self._free) - count :]
        return taken, evicted

    def give(self, pages: Int32s) -> None:
        """Pages that hold nothing committed are free again."""
        self._free.extend(pages[::-1].tolist())

    def commit(self, sequence: Sequence) -> Int32s:
        """Make the full blocks of what `sequence` has computed visible to others.

        Returns pages that it needs no more, as others had committed the same blocks first; the caller gives them.
        """
        if not self.config.enable_block_reuse:
            return EMPTY
        block = self.config.tokens_per_block
        full = min(sequence.computed, sequence.commit_until) // block
        if full <= sequence.committed:
            return EMPTY
        first, stop = sequence.committed, full
        tokens = sequence.token_slice(first * block, stop * block)
        kept, free = self.tree.commit(sequence.hold, tokens, sequence.pages.view[first:stop])
        sequence.pages.view[first:stop] = kept
        sequence.committed = full
        return free

    def release(self, sequence: Sequence) -> None:
        """Its own pages are free; what it committed stays until it is evicted."""
        self.give(sequence.pages.view[sequence.committed :])
        self.give(sequence.spare.view)
        self.tree.release(sequence.hold)

    def clear(self) -> Int32s:
        """Drop every block that no request holds; returns the pages."""
        pages = self.tree.evict(self.tree.num_idle)
        self.give(pages)
        return pages

    def free_pages(self) -> list[int]:
        return list(self._free)
