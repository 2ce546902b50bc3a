"""The pages of one rank's device: free ones, those that running requests fill, and those of committed blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from worker.core.arrays import Int32s
from worker.core.pages import FreePages
from worker.core.runs import NOTHING, Match, PartMatch
from worker.core.sequences import Sequence
from worker.core.tree import EMPTY, RunTree


class ReusePolicy(enum.StrEnum):
    """What is committed: prompt and reply; the prompt alone; both, with an owner and a register of conversations."""

    ALL_REUSABLE = "all_reusable"
    PER_REQUEST = "per_request"
    PER_CONVERSATION = "per_conversation"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`num_pages` is agreed by all ranks. `enable_block_reuse` False: nothing is committed.

    `enable_partial_reuse`: where a match ends inside a block, that block's page is copied and its common tokens are not
    computed again. They do not count as cached tokens: those are whole blocks that are shared.
    """

    num_pages: int
    tokens_per_block: int
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    policy: ReusePolicy = ReusePolicy.ALL_REUSABLE
    max_tracked_conversations: int = 65_536


class Cache:
    """Takes and gives pages, all or none; commits what is full; evicts what nobody holds."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.tree = RunTree(config.tokens_per_block)
        self.free = FreePages(config.num_pages)

    @property
    def num_available(self) -> int:
        """Pages that `take` could give now."""
        return len(self.free) + self.tree.num_idle

    @property
    def num_in_use(self) -> int:
        """Pages that some request holds."""
        return self.config.num_pages - self.num_available

    def match(self, scope: bytes, tokens: Int32s, max_blocks: int) -> Match:
        return self.tree.match(scope, tokens, max_blocks) if self.config.enable_block_reuse else NOTHING

    def match_within(self, match: Match, tokens: Int32s) -> PartMatch | None:
        """The block to copy behind `match`; `tokens` are those behind it that may come from there."""
        return self.tree.match_within(match, tokens) if self.config.enable_partial_reuse else None

    def take(self, count: int) -> tuple[Int32s, Int32s] | None:
        """`count` pages, all or none, and which of them were evicted for it. None: the caller must wait or let go."""
        if count > self.num_available:
            return None
        missing = count - len(self.free)
        evicted = self.tree.evict(missing) if missing > 0 else EMPTY
        self.free.give(evicted)
        return self.free.take(count), evicted

    def give(self, pages: Int32s) -> None:
        """Pages that hold nothing committed are free again."""
        self.free.give(pages)

    def commit(self, sequence: Sequence) -> Int32s:
        """Make the full blocks of what `sequence` has computed visible to others.

        Returns pages that it needs no more, as others had committed the same blocks first; the caller gives them.
        """
        if not self.config.enable_block_reuse:
            return EMPTY
        block = self.config.tokens_per_block
        full = min(sequence.computed, sequence.commit_until) // block
        first = sequence.committed
        if full <= first:
            return EMPTY
        tokens = sequence.token_slice(first * block, full * block)
        owner = sequence.conversation if self.config.policy is ReusePolicy.PER_CONVERSATION else ""
        kept, free = self.tree.commit(sequence.hold, tokens, sequence.pages.view[first:full], owner)
        sequence.pages.view[first:full] = kept
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
