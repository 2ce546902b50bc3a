"""One rank's KV cache: the tree of committed blocks, the pages of its tiers, and how long blocks are kept."""

from __future__ import annotations

import numpy as np

from enginelink.block_keys import BlockKey, block_keys
from worker.core.arrays import EMPTY, Int32s
from worker.core.config import CacheConfig
from worker.core.events import KEY_BYTES, CacheEvent, Cleared, stand_ins
from worker.core.journal import Journal
from worker.core.paths import below, cold_segments, descend, match_within, path_pages, segments
from worker.core.pools import Pools
from worker.core.retention import ChangedStretch, CommittedRetentionHandle, Retention, blocks_of
from worker.core.runs import NOTHING, Hold, Match, PartMatch
from worker.core.sequences import Sequence
from worker.core.stats import CLEARED, CacheStats
from worker.core.tiers import COLD, Tier
from worker.core.tree import RunTree
from worker.core.tree_check import check_tree


class KvCache:
    """Takes and gives pages, all or none; commits what is full; keeps, moves and drops what nobody holds.

    `finds_by_key`: the tree knows blocks by their keys alone, as a checkpoint keeps them.
    """

    def __init__(self, config: CacheConfig, journal: Journal) -> None:
        self.config = config
        self.stats = CacheStats()
        self.tree = RunTree(config.tokens_per_block)
        self.pools = Pools(config, self.tree, journal, self.stats)
        self.retention = Retention(self.tree)
        self._journal = journal
        self.finds_by_key = False
        if config.tells_events:
            self.tree.events = []

    def begin(self, plan: int, now_ms: int) -> None:
        """A plan begins; `now_ms` is its time."""
        self.tree.begin(plan)
        self.pools.begin(plan)
        lapsed = self.retention.begin(now_ms)
        if lapsed:
            self.stats.lapsed_blocks += blocks_of(lapsed)
            self._note("lapse", lapsed)

    def take_events(self) -> list[CacheEvent]:
        """What changed since the last call."""
        events = self.tree.events
        if not events:
            return []
        self.tree.events = []
        return events

    @property
    def num_available(self) -> int:
        """Pages of the device that `take` could give now."""
        return len(self.pools.free[Tier.DEVICE]) + self.tree.num_idle[Tier.DEVICE]

    @property
    def num_in_use(self) -> int:
        """Pages of the device that some request or copy holds."""
        return self.config.num_pages - self.num_available

    def match(self, scope: bytes, tokens: Int32s, max_blocks: int) -> Match:
        return self.tree.match(scope, tokens, max_blocks) if self.config.enable_block_reuse else NOTHING

    def match_within(self, match: Match, tokens: Int32s) -> PartMatch | None:
        """The block to copy behind `match`; `tokens` are those behind it that may come from there."""
        if not self.config.enable_partial_reuse:
            return None
        return match_within(match, tokens, self.tree.block_bytes, self._is_ready)

    def _is_ready(self, page: int) -> bool:
        return self.pools.is_ready(np.array([page], np.int32))

    def num_cold(self, hold: Hold | Match) -> int:
        """Blocks of the path to there that are not on the device."""
        return sum([part.stop - part.start for part in cold_segments(hold.run, hold.length)])

    def is_loaded(self, hold: Hold | Match) -> bool:
        """All blocks of the path to there can be read on the device."""
        return not self.num_cold(hold) and (not self.pools.copies.num_loads or self.pools.is_ready(path_pages(hold)))

    def count_match(self, hold: Hold, uncached_tokens: int) -> None:
        """A request was admitted behind `hold`, with so many prompt tokens to compute."""
        matched = self.stats.matched_blocks
        matched[Tier.DEVICE] += hold.blocks
        for segment in cold_segments(hold.run, hold.length):
            for tier in COLD:
                start, stop = segment.run.span(tier)
                count = max(0, min(stop, segment.stop) - max(start, segment.start))
                matched[tier] += count
                matched[Tier.DEVICE] -= count
        self.stats.uncached_tokens += uncached_tokens

    def take(self, count: int) -> Int32s | None:
        """`count` pages of the device, all or none. None: the caller must wait or let go."""
        return self.pools.take(count)

    def give(self, pages: Int32s) -> None:
        """Pages that hold nothing committed are free again."""
        self.pools.give(pages)

    def commit(self, sequence: Sequence) -> Int32s:
        """Make the full blocks of what `sequence` has computed visible to others.

        What somebody else committed meanwhile is kept instead of ours, and stays theirs. Returns pages that the
        sequence needs no more; the caller gives them.
        """
        if not self.config.enable_block_reuse:
            return EMPTY
        block = self.config.tokens_per_block
        full = min(sequence.computed, sequence.commit_until) // block
        first = sequence.committed
        if full <= first:
            return EMPTY
        hold = sequence.hold
        tokens = sequence.token_slice(first * block, full * block).tobytes()
        if self.finds_by_key:
            keys = self._keys(hold, tokens)
            tokens = stand_ins(keys, block).tobytes()
        pages = sequence.pages.view[first:full]
        found = descend(hold.run, hold.length, tokens, full - first, self.tree.block_bytes)
        unused = EMPTY
        if found.blocks:
            unused = self._join(hold, found, pages)
            sequence.extends = False
        if found.blocks < len(pages):
            start = first + found.blocks
            terms = sequence.terms(start, full, self.retention.births)
            for _, kept in terms:
                self.retention.has_timed |= kept.duration_ms > 0
            rest = tokens[found.blocks * self.tree.block_bytes :]
            keys = keys[KEY_BYTES * found.blocks :] if self.finds_by_key else self._keys(hold, rest)
            self.tree.append(hold, rest, keys, pages[found.blocks :], terms)
            if not sequence.extends:
                sequence.extends = True
                self._restored(self.retention.extended(hold, sequence.owner))
        sequence.committed = full
        return unused

    def _keys(self, hold: Hold, tokens: bytes) -> bytes:
        """Of the blocks `tokens` behind `hold`."""
        previous = BlockKey(hold.run.key_before(hold.length))
        return b"".join(block_keys(previous, tokens, self.config.tokens_per_block))

    def _join(self, hold: Hold, found: Match, pages: Int32s) -> Int32s:
        """Move `hold` to what was found behind it; `pages` become those of the blocks found. Returns those unused."""
        unused = EMPTY
        before = hold.blocks
        for segment in segments(found.run, found.length, before):
            at = segment.run.start + segment.start - before
            count = segment.stop - segment.start
            free = self.pools.adopt(segment, pages[at : at + count].copy())
            pages[at : at + count] = segment.run.pages.view[segment.start : segment.stop]
            unused = np.concatenate([unused, free])
        assert found.run is not None
        self.tree.move(hold, found.run, found.length)
        return unused

    def release(self, sequence: Sequence) -> None:
        """Its own pages are free; what it committed stays until it leaves."""
        self.give(sequence.pages.view[sequence.committed :])
        if sequence.spare.size:
            self.give(sequence.spare.view)
        hold = sequence.hold
        self.tree.release(hold)
        if self.retention.has_timed:
            for segment in segments(hold.run, hold.length):
                self.retention.let_go(segment.run)

    # Retention.

    def plan_committed_retention(
        self, conversation: str, with_descendants: tuple[str, ...] = ()
    ) -> CommittedRetentionHandle:
        """What this conversation owns now, to be demoted later or never.

        `with_descendants`: demoted ones, which do not count as other paths.
        """
        return self.retention.plan(conversation, with_descendants)

    def demote(self, conversation: str, with_descendants: tuple[str, ...], priority: int) -> list[ChangedStretch]:
        """Plan and apply at once, noted and counted."""
        changed = self.retention.demote_now(conversation, with_descendants, priority)
        self.stats.demoted_conversations += 1
        self.stats.demoted_blocks += blocks_of(changed)
        self._journal.note("demote", conversation, len(changed))
        self._note("demoted", changed)
        return changed

    def restore(self, conversation: str) -> list[ChangedStretch]:
        """A demoted conversation came back."""
        self.stats.restored_conversations += 1
        self._journal.note("restore", conversation)
        return self._restored(self.retention.restore(conversation))

    def _restored(self, changed: list[ChangedStretch]) -> list[ChangedStretch]:
        if not changed:
            return changed
        self.stats.restored_blocks += blocks_of(changed)
        self._note("restored", changed)
        return changed

    def _note(self, act: str, changed: list[ChangedStretch]) -> None:
        for one in changed:
            self._journal.note(act, one.run, one.start, one.stop, one.old, one.new)

    # Clearing.

    def clear(self, scope: bytes | None = None, owners: tuple[str, ...] | None = None) -> int:
        """Drop what nobody holds: everything; what lies in `scope`; or what `owners` own and nobody else extends.

        Returns how many blocks went.
        """
        before = self.tree.num_blocks
        if owners is not None:
            for run, first in self.retention.clear_parts(dict.fromkeys(owners, self.retention.births)):
                if self.tree.find_run(run.number) is run:
                    self.pools.clear(run, first, CLEARED)
        else:
            root = self.tree.root(scope) if scope is not None else None
            runs = self.tree.runs() if scope is None else below(root) if root is not None else ()
            for run in sorted(runs, key=lambda run: (-run.start, run.number)):
                if run.parent is not None and not run.children and run.held_length < run.length:
                    self.pools.clear(run, run.held_length, CLEARED)
        self._journal.note("clear", 0, before - self.tree.num_blocks)
        if scope is None and owners is None and not self.tree.num_blocks and self.tree.events is not None:
            self.tree.events = [Cleared()]
        return before - self.tree.num_blocks

    def check(self) -> None:
        """Every promise of the tree, and that each block has its key."""
        check_tree(self.tree)
        if self.finds_by_key:
            return
        for run in self.tree.runs():
            if run.parent is not None:
                keys = self._keys(Hold(run, 0), bytes(run.tokens))
                assert keys == bytes(run.keys), "a key that is not its block's"
