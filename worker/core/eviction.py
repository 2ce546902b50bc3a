"""In which order idle blocks leave: by the moment their run was last let go, ties by its number.

The order is a heap whose entries may be stale. Whoever makes a run evictable adds it; what an entry says is believed
only if the run still says the same when the entry comes up. So a run that is used again costs nothing here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

Stamp: TypeAlias = tuple[int, int]
"""The plan in which it happened, and the how manyth within it."""


class Evictable(Protocol):
    number: int
    stamp: Stamp


SLACK = 64


class EvictionOrder:
    """Holds at most a few entries per run; `first` costs what went stale since."""

    def __init__(self) -> None:
        self._heap: list[tuple[Stamp, int]] = []

    def add(self, run: Evictable) -> None:
        heapq.heappush(self._heap, (run.stamp, run.number))

    def first(self, is_current: Callable[[Stamp, int], bool]) -> int | None:
        """The number of the run that leaves first; it stays in the order until its entry goes stale."""
        while self._heap:
            if is_current(*self._heap[0]):
                return self._heap[0][1]
            heapq.heappop(self._heap)
        return None

    def is_crowded(self, num_runs: int) -> bool:
        return len(self._heap) > SLACK + 4 * num_runs

    def rebuild(self, runs: Iterable[Evictable]) -> None:
        """Exactly `runs`."""
        self._heap = [(run.stamp, run.number) for run in runs]
        heapq.heapify(self._heap)

    def __contains__(self, run: Evictable) -> bool:
        return (run.stamp, run.number) in self._heap
