"""Where on LRU's curve to measure, and how much more cache LRU needs for what another policy hits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kinroute.replay.ceiling import endless
from kinroute.replay.lru import Recency
from kinroute.replay.optimum import Bound, counted
from kinroute.replay.segments import Blocks, Role, Segments, segments_of
from kinroute.replay.walk import Walk

TOLERANCE_POINTS = 0.05
"""How near to where it should be LRU is placed."""


@dataclass(frozen=True, slots=True)
class Placed:
    """With `capacity_blocks` LRU hits `hit_blocks`, `points` of hit ratio, about, below a cache without end."""

    points: float
    capacity_blocks: int
    hit_blocks: int


def place(
    requests: Sequence[Blocks],
    points: Sequence[float],
    *,
    role: Role,
    warmup: float,
    run_lru: Callable[[int], int] | None = None,
) -> list[Placed]:
    """For each of `points` a capacity, within `TOLERANCE_POINTS` where there is one: a small load jumps.

    `run_lru`: blocks that LRU hits at a capacity, of the requests after the warm-up; by default the fast LRU says.
    """
    curve = LruCurve(segments_of(requests, role=role), warmup, run_lru)
    return [curve.place(one) for one in points]


def lru_needs(requests: Sequence[Blocks], hits: Sequence[int], *, role: Role, warmup: float) -> list[int | None]:
    """The blocks that LRU needs for each of these numbers of hits, within half a percent; None: no cache is enough.

    By the capacity with which a policy hits as much, that is the equivalent extra memory.
    """
    curve = LruCurve(segments_of(requests, role=role), warmup)
    return [curve.needs(one) for one in hits]


class LruCurve:
    """Hits of LRU by capacity; each capacity is run once. More is taken to hit no less, as nearly always."""

    def __init__(self, segments: Segments, warmup: float, run_lru: Callable[[int], int] | None = None) -> None:
        self._segments = segments
        self._warmup = warmup
        self._run_lru = run_lru or self._walk
        self._hits: dict[int, int] = {}
        top = Walk(segments, endless(segments), Recency(segments))
        top.run()
        self.ceiling: Bound = counted(segments, top.hits, warmup)
        self._most_held = max(1, top.most_held)
        """With less than this, and with a little more, requests wait for room."""
        self._endless = endless(segments)
        self._hits[self._endless] = self.ceiling.hit_blocks

    def hits(self, capacity_blocks: int) -> int:
        if capacity_blocks not in self._hits:
            self._hits[capacity_blocks] = self._run_lru(capacity_blocks)
        return self._hits[capacity_blocks]

    def place(self, points: float) -> Placed:
        """Where LRU sits `points` below the ceiling."""
        prompt_blocks = self.ceiling.prompt_blocks
        slack = TOLERANCE_POINTS / 100 * prompt_blocks
        target = self.ceiling.hit_blocks - points / 100 * prompt_blocks

        def is_near(low: int, high: int) -> bool:
            return high - low <= 1 or any(abs(self.hits(one) - target) <= slack for one in (low, high) if one)

        low, high = self._search(target, is_near)
        best = min((low or high, high), key=lambda capacity: abs(self.hits(capacity) - target))
        return Placed(points, best, self.hits(best))

    def needs(self, hits: int) -> int | None:
        """The blocks with which it hits so many."""
        if hits > self.ceiling.hit_blocks:
            return None
        return self._search(hits, lambda low, high: high - low <= max(1, high // 200))[1]

    def _search(self, target: float, is_near: Callable[[int, int], bool]) -> tuple[int, int]:
        """Capacities with less and with at least `target` hits, once they are near."""
        self.hits(self._most_held)
        low = max((one for one, hits in self._hits.items() if hits < target), default=0)
        high = min(one for one, hits in self._hits.items() if hits >= target and one > low)
        for turn in itertools.count():
            if is_near(low, high):
                break
            # Every third time halfway, so that it is never much slower than a bisection.
            middle = self._guess(low, high, target) if turn % 3 < 2 else _middle(low, high)
            if self.hits(middle) < target:
                low = middle
            else:
                high = middle
        return low, high

    def _guess(self, low: int, high: int, target: float) -> int:
        """Where the misses that a larger cache would spare are those of `target`, if they fall by powers."""
        if high == self._endless:
            return min(low * 3 // 2, _middle(low, high))
        if not low:
            return _middle(low, high)
        above, wanted, below = (
            math.log(self.ceiling.hit_blocks - hits + 1.0) for hits in (self.hits(low), target, self.hits(high))
        )
        share = (above - wanted) / (above - below) if above > below else 0.5
        return min(max(int(low * (high / low) ** share), low + 1), high - 1)

    def _walk(self, capacity_blocks: int) -> int:
        walk = Walk(self._segments, capacity_blocks, Recency(self._segments))
        walk.run()
        return counted(self._segments, walk.hits, self._warmup).hit_blocks


def _middle(low: int, high: int) -> int:
    """Between them, by their ratio."""
    return min(max(math.isqrt(max(1, low) * high), low + 1), high - 1)
