"""In which order idle blocks leave a tier: by effective priority, then by the moment their run was last let go, ties by
its number.

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
Entry: TypeAlias = tuple[int, Stamp, int]
"""Effective priority, stamp and number of a run."""

SLACK = 64


class EvictionOrder:
    """Of one tier. Holds at most a few entries per run; `first` costs what went stale since."""

    def __init__(self, tier: Tier, runs: Mapping[int, Run]) -> None:
        self._tier = tier
        self._runs = runs
        self._heap: list[Entry] = []

    def add(self, run: Run) -> None:
        """`run` is evictable, with the priority and the stamp that it has now."""
        entry = (run.effective(self._tier), run.stamp, run.number)
        if run.entries[self._tier] != entry:
            run.entries[self._tier] = entry
            heapq.heappush(self._heap, entry)
            if len(self._heap) > SLACK + 4 * len(self._runs):
                self._rebuild(self._runs.values())

    def first(self) -> Run | None:
        """The run that leaves first; it stays in the order until its entry goes stale."""
        while self._heap:
            entry = self._heap[0]
            run = self._runs.get(entry[2])
            if run is not None and run.entries[self._tier] == entry:
                if run.stamp == entry[1] and run.is_evictable(self._tier) and run.effective(self._tier) == entry[0]:
                    return run
                run.entries[self._tier] = None
            heapq.heappop(self._heap)
        return None

    def _rebuild(self, runs: Iterable[Run]) -> None:
        self._heap = [entry for run in runs if (entry := run.entries[self._tier]) is not None]
        heapq.heapify(self._heap)

    def __contains__(self, run: Run) -> bool:
        """It would be found with what it says now."""
        entry = (run.effective(self._tier), run.stamp, run.number)
        return run.entries[self._tier] == entry and entry in self._heap
