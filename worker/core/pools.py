"""The pages of a rank's tiers: which are free, how idle blocks leave a tier, and how they come back.

A block leaves a tier for the next colder one that there is, or is dropped with all that hangs below it: because its
effective priority is below the threshold, because no tier is colder, or because there is no room there that something
worth less would give up. A page is free again the moment its block moves down: whoever writes to it next does so behind
the copy. So that the forward need not wait for that, room on the device is made ahead of need, a little in every plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker.core.arrays import EMPTY, Int32s
from worker.core.config import CacheConfig
from worker.core.copies import Copies, Copy
from worker.core.fates import Fate, Fates
from worker.core.journal import Journal
from worker.core.pages import FreePages
from worker.core.paths import below, cold_segments, segments
from worker.core.runs import Hold, Match, Run, Segment
from worker.core.stats import (
    BELOW_THRESHOLD,
    CAPACITY,
    COPY_FAILED,
    NO_COLDER_TIER,
    TIER_OFF,
    CacheStats,
    PageCounts,
)
from worker.core.tiers import COLD, CopyWork, Tier
from worker.core.tree import RunTree

AHEAD_SHARE = 16
"""Of the pages of the device, 1 in so many is kept free for the next plan where there is a colder tier."""
WRITES_AHEAD = 4
"""How many plans' worth of pages may be on their way to the disk at once; what waits for it lies in memory."""


class Pools:
    """`work`: the copies of this plan, in order. Everything that is decided here is noted in the journal."""

    def __init__(self, config: CacheConfig, tree: RunTree, journal: Journal, stats: CacheStats) -> None:
        self._config = config
        self._tree = tree
        self._journal = journal
        self._stats = stats
        self.sizes = (config.num_pages, config.num_host_pages, config.num_disk_pages)
        self.free = tuple(FreePages(size) for size in self.sizes)
        self.off: set[Tier] = set()
        self.copies = Copies(self.sizes)
        self.fates = Fates()
        self.work: list[CopyWork] = []
        self._ahead = min(config.max_offload_pages_per_plan, -(-config.num_pages // AHEAD_SHARE))
        self._plan = 0
        self._offload_left = [0, 0]
        self.onboard_left = 0

    def begin(self, plan: int) -> None:
        self._plan = plan
        self.work = []
        self._offload_left = [self._config.max_offload_pages_per_plan] * 2
        self.onboard_left = self._config.max_onboard_pages_per_plan

    @property
    def offload_left(self) -> int:
        """Pages of the device that may still move down in this plan; as many as there are where none can."""
        return self.sizes[Tier.DEVICE] if self.colder(Tier.DEVICE) is None else self._offload_left[Tier.DEVICE]

    def colder(self, tier: Tier) -> Tier | None:
        """Where what leaves `tier` goes."""
        return next((one for one in COLD if one > tier and self.sizes[one] and one not in self.off), None)

    def counts(self, tier: Tier) -> PageCounts:
        free, cached = len(self.free[tier]), self._tree.num_idle[tier]
        moving = self.copies.num_leaving[tier]
        total = self.sizes[tier]
        return PageCounts(total, free, total - free - cached - moving, cached, moving, tier in self.off)

    # Taking pages of the device.

    def take(self, count: int) -> Int32s | None:
        """`count` pages of the device, all or none; None: that many are not free or idle."""
        free = self.free[Tier.DEVICE]
        if count > len(free) + self._tree.num_idle[Tier.DEVICE]:
            return None
        while len(free) < count:
            left = self._leave(Tier.DEVICE, count - len(free))
            assert left, "idle blocks that no eviction order holds"
        return free.take(count)

    def give(self, pages: Int32s) -> None:
        """Pages of the device that hold nothing committed are free again."""
        self.free[Tier.DEVICE].give(pages)

    def make_ahead(self) -> None:
        """Room on the device for the next plan, as far as this one may still move pages.

        Where less than half of what is kept free is left, all of it is made: few big copies cost less than many.
        """
        free, ahead = self.free[Tier.DEVICE], self._ahead
        if 2 * len(free) >= ahead or self.colder(Tier.DEVICE) is None:
            return
        while len(free) < ahead and self._leave(Tier.DEVICE, ahead - len(free), ahead=True):
            pass

    # How blocks leave.

    def _leave(self, tier: Tier, count: int, *, ahead: bool = False, limit: tuple[int, int] | None = None) -> bool:
        """Up to `count` blocks of whoever is first in `tier`'s order leave it. False: nobody can.

        `ahead`: nothing is dropped for want of room, nor beyond what this plan may move. `limit`: nothing above that
        priority and value leaves.
        """
        run = self._tree.orders[tier].first()
        if run is None:
            return False
        priority = run.effective(tier)
        if limit is not None and (priority, run.value) > limit:
            return False
        stop = run.ends[tier]
        start = max(run.span(tier)[0], run.held_length, run.stretches.first_within(stop, priority))
        wanted, count = count, min(stop - start, count)
        colder = self.colder(tier)
        if colder is None:
            reason = NO_COLDER_TIER
        elif priority < self._config.cold_tier_offload_min_priority:
            reason = BELOW_THRESHOLD
        elif self._sink(run, count, tier, colder, priority, wanted):
            return True
        else:
            reason = CAPACITY
        if ahead and reason is not BELOW_THRESHOLD:
            return False
        self._drop(run, stop - count, reason, priority)
        return True

    def _sink(self, run: Run, count: int, source: Tier, target: Tier, priority: int, wanted: int) -> bool:
        """Up to `count` blocks move down. False: there is no room, or this plan may move no more.

        Room is made at once for all of the `wanted` blocks that are to leave `source`: the others are worth no less.
        """
        may_move = self._offload_left[source]
        if target is Tier.DISK:
            may_move = min(may_move, WRITES_AHEAD * self._config.max_offload_pages_per_plan - self.copies.num_to_disk)
        wanted = min(wanted, may_move, self._tree.num_idle[source])
        free = self.free[target]
        while len(free) < wanted and self._leave(target, wanted - len(free), limit=(priority, run.value)):
            pass
        count = min(count, may_move, len(free))
        if count <= 0:
            return False
        targets = free.take(count)
        sources = self._tree.sink(run, count, source, target, targets)
        self._offload_left[source] -= count
        if source is not Tier.DEVICE:
            self.copies.disown(source, sources)
        self.free[source].give(sources)
        self._begin(source, target, sources, targets)
        return True

    def _begin(self, source: Tier, target: Tier, sources: Int32s, targets: Int32s, hold: Hold | None = None) -> None:
        self.work.append(self.copies.begin(source, target, sources, targets, hold))
        self._journal.note("move", self.copies.number, source, target, pages=(sources, targets))

    def _drop(self, run: Run, index: int, reason: str, priority: int) -> None:
        """Drop the blocks of `run` from `index` on, and all below; nobody holds any of it."""
        keys = b"".join([bytes(run.keys[32 * index :]), *(bytes(one.keys) for one in below(run))])
        self.fates.note(Fate(self._plan, reason, priority, keys))
        self._stats.evicted_pages[reason] += len(keys) // 32
        number = run.number
        pages = self._tree.cut(run, index)
        for tier, part in pages:
            filled = self.copies.disown(tier, part)
            # Whoever fills a page of a colder tier next is ordered behind who fills it now.
            self.free[tier].give(part[~filled] if tier is Tier.DEVICE and filled.any() else part)
        self._journal.note(f"evict {reason}", number, index, pages=[part for _, part in pages])

    def clear(self, run: Run, index: int, reason: str) -> None:
        """Drop from `index` on; nobody holds any of it."""
        self._drop(run, index, reason, run.stretches.top(index))

    # How blocks come back.

    def load(self, hold: Hold, count: int) -> bool:
        """Up to `count` of the first cold blocks of this held path are on their way to the device.

        Not readable before the copy has ended. False: there are no pages for them.
        """
        pages = self.take(count)
        if pages is None:
            return False
        for tier in COLD:
            parts: list[tuple[Segment, Int32s]] = []
            for segment in cold_segments(hold.run, hold.length):
                start, stop = segment.start, min(segment.stop, segment.run.ends[tier], segment.start + len(pages))
                if start >= stop or segment.run.tier_of(start) is not tier:
                    break
                part = Segment(segment.run, start, stop)
                sources = part.run.pages.view[start:stop].copy()
                self.copies.disown(tier, sources)
                self._tree.promote(part, pages[: stop - start])
                parts.append((part, sources))
                pages = pages[stop - start :]
            if parts:
                self._begin_load(hold, tier, parts)
        assert not len(pages), "more blocks asked for than are cold"
        return True

    def _begin_load(self, hold: Hold, tier: Tier, parts: Sequence[tuple[Segment, Int32s]]) -> None:
        last = parts[-1][0]
        targets = np.concatenate([part.run.pages.view[part.start : part.stop] for part, _ in parts])
        sources = np.concatenate([pages for _, pages in parts])
        keeps = self._tree.hold(b"", Match(last.run, last.stop, 0))
        self.onboard_left -= len(targets)
        self._begin(tier, Tier.DEVICE, sources, targets, keeps)

    def is_ready(self, pages: Int32s) -> bool:
        """Whether these device pages can be read."""
        return not self.copies.num_loads or not self.copies.is_filling(Tier.DEVICE, pages).any()

    def adopt(self, segment: Segment, ours: Int32s) -> Int32s:
        """Somebody computed committed blocks again: where theirs are not readable on the device, ours replace them.

        `ours`: pages for all of `segment`. Returns those that are not needed; the segment's pages are right then.
        """
        run, start, stop = segment.run, segment.start, segment.stop
        unused: list[Int32s] = []
        warm = min(stop, max(start, run.ends[Tier.DEVICE]))
        if start < warm:
            theirs = run.pages.view[start:warm]
            mine = ours[: warm - start]
            arriving = self.copies.disown(Tier.DEVICE, theirs) if self.copies.num_loads else np.zeros(len(mine), bool)
            unused.append(mine[~arriving])
            theirs[arriving] = mine[arriving]
        for tier in COLD:
            first, last = max(warm, run.span(tier)[0]), min(stop, run.ends[tier])
            if first < last:
                left = run.pages.view[first:last].copy()
                self.copies.disown(tier, left)
                self._tree.promote(Segment(run, first, last), ours[first - start : last - start])
                self.free[tier].give(left)
        return np.concatenate(unused) if unused else EMPTY

    # How copies end.

    def ended(self, number: int, good: int) -> None:
        """Copy `number` is over on every rank; the first `good` pages arrived on all of them."""
        copy, current = self.copies.end(number)
        work = copy.work
        failed = current[good:].any()
        if work.target is Tier.DEVICE:
            self.free[work.source].give(work.sources)
            self.free[Tier.DEVICE].give(work.targets[~current])
        self._stats.moved(work.source, work.target, good)
        self._journal.note("copied", number, good)
        if good < len(work.targets):
            self._stats.copy_failures[max(work.source, work.target)] += 1
        if copy.hold is not None:
            self._loaded(copy, copy.hold, current, good)
        elif failed:
            self._lose_pages(work.target, set(work.targets[good:][current[good:]].tolist()))

    def _loaded(self, copy: Copy, hold: Hold, current: Int32s | np.ndarray, good: int) -> None:
        """The path of `hold` ends with the blocks of `copy`; from the first that lacks its page on, they are lost."""
        lost = np.flatnonzero(current[good:])
        if len(lost):
            index = hold.blocks - len(current) + good + int(lost[0])
            segment = segments(hold.run, hold.length, index)[0]
            self._tree.detach(hold)
            self.lose(segment.run, segment.start, COPY_FAILED)
        else:
            self._tree.detach(hold)

    def _lose_pages(self, tier: Tier, pages: set[int]) -> None:
        wanted = np.fromiter(sorted(pages), np.int32, len(pages))
        for run in list(self._tree.runs()):
            if self._tree.find_run(run.number) is not run:
                continue
            start, stop = run.span(tier)
            found = np.flatnonzero(np.isin(run.pages.view[start:stop], wanted)) if start < stop else EMPTY
            if len(found):
                self.lose(run, start + int(found[0]), COPY_FAILED)

    def lose(self, run: Run, index: int, reason: str) -> None:
        """These blocks from `index` on, and all below, are gone; whoever holds them holds what is left of the path."""
        copying = {id(copy.hold): copy for copy in self.copies.running.values() if copy.hold is not None}
        for one in [run, *below(run)]:
            for hold in list(one.holds):
                if one is run and hold.length <= index:
                    continue
                copy = copying.get(id(hold))
                if copy is not None:
                    copy.hold = None
                    self._tree.detach(hold)
                elif index:
                    self._tree.move(hold, run, index)
                else:
                    assert run.parent is not None
                    self._tree.move(hold, run.parent, run.parent.length)
        if self._tree.find_run(run.number) is run:
            self._drop(run, index, reason, run.stretches.top(index))

    def switch_off(self, tier: Tier) -> None:
        """Nothing goes there any more, and what is there is gone."""
        self.off.add(tier)
        self._journal.note("off", tier)
        for run in sorted(self._tree.runs(), key=lambda run: (run.start, run.number)):
            start, stop = run.span(tier)
            if start < stop and self._tree.find_run(run.number) is run:
                self.lose(run, start, TIER_OFF)

    def charged(self, tier: Tier) -> list[int]:
        """Pages that no block has and that are not free: running copies leave them, or fill them for nobody."""
        pages: list[int] = []
        for copy in self.copies.running.values():
            if copy.work.source is tier and copy.work.target is Tier.DEVICE:
                pages += copy.work.sources.tolist()
            if copy.work.target is tier and tier is Tier.DEVICE:
                filling = self.copies.fills(tier, copy.work.targets, copy.work.number)
                pages += copy.work.targets[~filling].tolist()
        return pages
