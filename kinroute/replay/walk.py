"""A load walked through a cache of segments: what is held when, and which blocks leave, in an order that is given.

It follows the scheduler and the manager of a worker as far as they decide about blocks. Plans are `STEP_MS` apart. In
a plan answers that are over are kept and let go, then requests are admitted in the order of arrival, each holding all
of its path, then places are taken: of blocks that are free, else of idle ones, leaf first, a segment from its tail. A
prompt is there for others from the next plan on: who comes in the same plan and would compute the same block waits for
that. A request is admitted only where there is room for all of its prompt and a block for each that runs; who is
behind it waits too. A prompt larger than the cache is refused. The blocks of an answer are taken when it is over.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kinroute.replay.segments import Bools, Int64s, Segments

STEP_MS = 30
"""How long a step takes."""


class Order(Protocol):
    """In which order idle segments leave: the lowest of `keys` first, ties deepest first.

    `keys`: [S]. On any path keys may not rise towards the root where `may_leave_alone` is not set; those that it is set
    for leave in their turn whatever hangs below them. `waits_for_siblings`: whether who would compute what another
    computes in this plan waits, else it hits at once.
    """

    keys: Int64s
    may_leave_alone: Bools | None
    waits_for_siblings: bool

    def admitted(self, request: int, path: Int64s) -> None:
        """`path`: of prompt and answer."""

    def let_go(self, path: Int64s) -> None:
        """Of a request that is over."""


@dataclass(slots=True)
class _Running:
    request: int
    path: Int64s
    extra: int


class Walk:
    """`hits`: [N], prompt blocks of each request that were there. `waited`: requests that had to wait for room."""

    def __init__(self, segments: Segments, capacity_blocks: int, order: Order) -> None:
        self._segments = segments
        self._order = order
        self.capacity = capacity_blocks
        num = len(segments.length)
        self.present = np.zeros(num, np.int64)
        self._held = np.zeros(num, np.int64)
        # The last element stands for what is above the first segments: -1 in `parent`.
        self._children = np.zeros(num + 1, np.int64)
        self._made = np.full(num, -1, np.int64)
        self._leaving: list[tuple[int, int, int]] = []
        self._used = 0
        self._num_held = 0
        self._ends: list[tuple[int, int, _Running]] = []
        self._queue: list[int] = []
        self._came = 0
        self._plan = -1
        self._lent = 0
        self._arrivals = np.ceil(segments.arrivals_s * (1000 / STEP_MS)).astype(np.int64).tolist()
        self._over = np.ceil(segments.ends_s * (1000 / STEP_MS)).astype(np.int64).tolist()
        self.hits = np.zeros(segments.num_requests, np.int64)
        self.waited = 0

    def run(self) -> None:
        while self._came < len(self._arrivals) or self._ends or self._queue:
            self.step()

    def step(self) -> None:
        """The next plan in which something happens."""
        wakes = []
        if self._came < len(self._arrivals):
            wakes.append(self._arrivals[self._came])
        if self._ends:
            wakes.append(self._ends[0][0])
        if self._queue and self._retries:
            wakes.append(self._plan + 1)
        self._plan = max(self._plan + 1, min(wakes))
        self._give_back()
        while self._ends and self._ends[0][0] <= self._plan:
            self._end(heapq.heappop(self._ends)[2])
        while self._came < len(self._arrivals) and self._arrivals[self._came] <= self._plan:
            self._queue.append(self._came)
            self._came += 1
        self._admit()
