"""LRU at any capacity, by the segment: the same hits as a worker's with `retention_policy: lru`, in about a second."""

from __future__ import annotations

import numpy as np

from kinroute.replay.schedule import Schedule
from kinroute.replay.segments import Bools, Int64s, Segments


class Recency:
    """What was let go first leaves first. A path that is let go is stamped as a whole, as the manager does."""

    schedule: Schedule | None = None
    may_leave_alone: Bools | None = None

    def __init__(self, segments: Segments) -> None:
        self.keys = np.zeros(len(segments.length), np.int64)
        self._released = 0

    def admitted(self, request: int) -> None:
        """Nothing is different."""

    def let_go(self, path: Int64s) -> None:
        self._released += 1
        self.keys[path] = self._released
