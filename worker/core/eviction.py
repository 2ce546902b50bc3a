"""In which order idle blocks leave a tier: by effective priority, then by what their run is worth (the same for all but
under the return index), then by the moment it was last let go, ties by its number.

The order is a heap whose entries may be stale. Whoever makes a run evictable, or changes what its entry says, adds it
anew; an entry is believed only if the run still says the same when it comes up. So a run that is used again costs
nothing here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from worker.core.tiers import Tier

if TYPE_CHECKING:
    from worker.core.runs import Run

Stamp: TypeAlias = tuple[int, int]
"""The plan in which it happened, and the how manyth within it."""
Entry: TypeAlias = tuple[int, int, Stamp, int]
"""Effective priority, value, stamp and number of a run."""

SLACK = 64


class EvictionOrder:
    """Of one tier. Holds at most a few entries per run; `first` costs what went stale since."""

    def __init__(self, tier: Tier, runs: Mapping[int, Run]) -> None:
        self._tier = tier
        self._runs = runs
        self._heap: list[Entry] = []

    def add(self, run: Run) -> None:
        """`run` is evictable, with the priority, the value and the stamp that it has now."""
        entry = self._entry(run)
        if run.entries[self._tier] != entry:
            run.entries[self._tier] = entry
            heapq.heappush(self._heap, entry)
            if len(self._heap) > SLACK + 4 * len(self._runs):
                self._rebuild(self._runs.values())

    def first(self) -> Run | None:
        """The run that leaves first; it stays in the order until its entry goes stale."""
        while self._heap:
            entry = self._heap[0]
            run = self._runs.get(entry[3])
            if run is not None and run.entries[self._tier] == entry:
                if run.is_evictable(self._tier) and self._entry(run) == entry:
                    return run
                run.entries[self._tier] = None
            heapq.heappop(self._heap)
        return None

    def _entry(self, run: Run) -> Entry:
        return run.effective(self._tier), run.value, run.stamp, run.number

    def _rebuild(self, runs: Iterable[Run]) -> None:
        self._heap = [entry for run in runs if (entry := run.entries[self._tier]) is not None]
        heapq.heapify(self._heap)

    def __contains__(self, run: Run) -> bool:
        """It would be found with what it says now."""
        entry = self._entry(run)
        return run.entries[self._tier] == entry and entry in self._heap
