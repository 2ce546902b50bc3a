"""What holds cover, and so which blocks are idle and stand in an eviction order.

A hold covers its path from the root. What is on the device, and what is covered, are each the beginning of any path:
so where a path begins to be held, or ceases to be, its idle blocks are counted by positions, not run by run.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.core.eviction import EvictionOrder
from worker.core.run_events import by_tier
from worker.core.runs import Hold, Run
from worker.core.tiers import NUM_TIERS, Tier


class Holding:
    """Of one tree, whose `runs` are by number. `num_idle[t]`: blocks of tier t that no hold covers."""

    def __init__(self, runs: Mapping[int, Run]) -> None:
        self.orders = tuple(EvictionOrder(tier, runs) for tier in Tier)
        self.num_idle = [0] * NUM_TIERS

    def attach(self, hold: Hold) -> None:
        """Count the hold in; stops at the first ancestor that was held before."""
        run = hold.run
        was_held = bool(run.holds) or run.held_children > 0
        run.holds.append(hold)
        if hold.length > run.held_length:
            self._cover(run, hold.length)
        if was_held or run.parent is None:
            return
        if not run.ends[0]:
            self._cover_cold_above(run)
            return
        # All that is above it lies on the device.
        held = 0
        parent: Run | None = run.parent
        while parent is not None:
            parent.held_children += 1
            if parent.held_children > 1:
                held = parent.start + parent.held_length
                break
            before, parent.held_length = parent.held_length, parent.pages.size
            if parent.holds:
                held = parent.start + before
                break
            parent = parent.parent
        self.num_idle[0] -= run.start - held

    def detach(self, hold: Hold) -> None:
        """Count it out; stops at the first ancestor that somebody else holds."""
        run = hold.run
        run.holds.remove(hold)
        if not run.held_children:
            self._cover(run, max([one.length for one in run.holds]) if run.holds else 0)
        if run.holds or run.held_children or run.parent is None:
            return
        if run.ends[0]:
            self._uncover_above(run)
        else:
            self._uncover_cold_above(run)

    def move(self, hold: Hold, run: Run, length: int) -> None:
        """To another place of its path."""
        if run is hold.run:
            hold.length = length
            if not run.held_children:
                self._cover(run, max([one.length for one in run.holds]))
            return
        moved = Hold(run, length)
        self.attach(moved)
        self.detach(hold)
        run.holds[run.holds.index(moved)] = hold
        hold.run, hold.length = run, length

    def retier(self, run: Run, ends: list[int]) -> None:
        """Blocks of `run` moved: this is where its tiers end now."""
        num_idle = self.num_idle
        for sign, of_tiers in ((-1, run.ends), (1, ends)):
            start = run.held_length
            for tier, end in enumerate(of_tiers):
                if end > start:
                    num_idle[tier] += sign * (end - start)
                    start = end
        parent, before = run.parent, run.first_tier
        run.ends = ends
        if parent is not None and run.first_tier is not before:
            parent.first_tiers[before] -= 1
            parent.first_tiers[run.first_tier] += 1
            self.enqueue(parent)
        self.enqueue(run)

    def enqueue(self, run: Run) -> None:
        """Into the order of each tier that some of its blocks can leave."""
        start = run.held_length
        first_tiers = run.first_tiers
        for tier, end in enumerate(run.ends):
            if first_tiers[tier]:
                return
            if end > start:
                self.orders[tier].add(run)
                start = end

    def _uncover_above(self, run: Run) -> None:
        """No hold needs `run` any more, which begins on the device, as does all that is above it."""
        held = 0
        parent = run.parent
        while parent is not None:
            parent.held_children -= 1
            if parent.held_children:
                held = parent.start + parent.held_length
                break
            if parent.holds:
                parent.held_length = max([one.length for one in parent.holds])
                held = parent.start + parent.held_length
                break
            parent.held_length = 0
            parent = parent.parent
        self.num_idle[0] += run.start - held

    def _uncover_cold_above(self, run: Run) -> None:
        """As `_uncover_above`, of a run that begins in a colder tier: those above it may be evictable now."""
        parent = run.parent
        while parent is not None:
            parent.held_children -= 1
            if parent.held_children:
                return
            self._cover(parent, max([one.length for one in parent.holds], default=0))
            if parent.holds:
                return
            parent = parent.parent

    def _cover_cold_above(self, run: Run) -> None:
        """The first hold of `run`, which begins in a colder tier, needs what is above it."""
        parent = run.parent
        while parent is not None:
            parent.held_children += 1
            if parent.held_children > 1:
                return
            self._cover(parent, parent.length)
            if parent.holds:
                return
            parent = parent.parent

    def _cover(self, run: Run, length: int) -> None:
        """Holds cover the first `length` blocks of `run` now; what they covered before may be evictable."""
        before = run.held_length
        if length == before:
            return
        run.held_length = length
        if run.ends[0] == run.pages.size:
            self.num_idle[0] += before - length
        else:
            low, high = min(before, length), max(before, length)
            for start, stop, tier in by_tier(run, low, high):
                self.num_idle[tier] += stop - start if length < before else start - stop
        if length < before:
            self.enqueue(run)
