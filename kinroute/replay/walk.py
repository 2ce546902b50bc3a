"""A load walked through a cache of segments: what is held when, and which blocks leave, in an order that is given.

It follows the scheduler and the manager of a worker as far as they decide about blocks. Plans are `STEP_MS` apart. In
a plan answers that are over are kept and let go, then requests are admitted in the order of arrival, each holding all
of its path, then places are taken: of blocks that are free, else of idle ones, leaf first, a segment from its tail. A
prompt is there for others from the next plan on: who comes in the same plan and would compute the same block waits for
that. A request is admitted only where there is room for all of its prompt and a block for each that runs; who is
behind it waits too. A prompt larger than the cache is refused. The blocks of an answer are taken when it is over.
"""

from __future__ import annotations

import copy
import heapq
from typing import Protocol

import numpy as np

from kinroute.replay.arm import STEP_MS
from kinroute.replay.segments import Bools, Float64s, Int64s, Segments


class Order(Protocol):
    """In which order idle segments leave: the lowest of `keys` first, ties deepest first.

    `keys`: [S]. On any path keys may not rise towards the root where `may_leave_alone` is not set; those that it is set
    for leave in their turn whatever hangs below them. `is_bound`: where it is open what a policy would do, what costs
    least is done: who asks for what another computes in this plan hits it at once instead of a plan later, and who
    computes a cached block again needs no second place for it.
    """

    keys: Int64s
    may_leave_alone: Bools | None
    is_bound: bool

    def admitted(self, request: int) -> None:
        """By rising number, where nobody waits for a sibling."""

    def let_go(self, path: Int64s) -> None:
        """A request is over, and only now the keys of what it held may become others."""


class Walk:
    """`hits`: [N], prompt blocks of each request that were there. `came`: requests so far. `waited`: how often a plan
    had no room for a request that was due. `most_held`: blocks that requests held at once.
    """

    def __init__(self, segments: Segments, capacity_blocks: int, order: Order) -> None:
        self._segments = segments
        self._order = order
        self._capacity = capacity_blocks
        num = len(segments.length)
        self._present = np.zeros(num, np.int64)
        self._held = np.zeros(num, np.int64)
        # One more stands for what is above the first segments, whose parent is -1.
        self._children = np.zeros(num + 1, np.int64)
        self._made = np.full(num, -1, np.int64)
        self._parents: list[int] = segments.parent.tolist()
        self._leaving: list[tuple[int, int, int]] = []
        self._used = self._num_held = self._lent = 0
        self._running: list[tuple[int, int]] = []
        self._queue: list[int] = []
        self._retries = False
        self._plan = -1
        self._arrivals: list[int] = _plans(segments.arrivals_s)
        self._ends: list[int] = _plans(segments.ends_s)
        self.came = 0
        self.hits = np.zeros(segments.num_requests, np.int64)
        self.waited = self.most_held = 0

    def forked(self, order: Order) -> Walk:
        """Another one that goes on from here, in another order."""
        fork = copy.copy(self)
        fork._order = order
        for name in ("_present", "_held", "_children", "_made", "_running", "_queue", "hits"):
            setattr(fork, name, getattr(self, name).copy())
        fork._leaving = []
        fork.waited = 0
        for segment in np.flatnonzero((self._present > 0) & (self._held == 0)).tolist():
            if not self._children[segment] or self._leaves_alone(segment):
                fork._push(segment)
        return fork

    def run(self, until: int | None = None) -> None:
        """Until that many requests have come and none waits; by default until all is over."""
        stop = len(self._arrivals) if until is None else until
        while self.came < stop or self._queue or (until is None and self._running):
            self._step()

    def _step(self) -> None:
        """The next plan in which something happens."""
        wakes = [self._plan + 1] if self._queue and self._retries else []
        if self.came < len(self._arrivals):
            wakes.append(self._arrivals[self.came])
        if self._running:
            wakes.append(self._running[0][0])
        self._plan = max(self._plan + 1, min(wakes))
        self._lent = 0
        while self._running and self._running[0][0] <= self._plan:
            self._end(heapq.heappop(self._running)[1])
        while self.came < len(self._arrivals) and self._arrivals[self.came] <= self._plan:
            self._queue.append(self.came)
            self.came += 1
        if self._queue:
            self._admit()
            self._make_room()
            self.most_held = max(self.most_held, self._num_held)

    def _admit(self) -> None:
        waiting: list[int] = []
        room = self._capacity - self._num_held - len(self._running)
        self._retries = False
        for at, request in enumerate(self._queue):
            if self._segments.prompt_blocks[request] > self._capacity:
                continue
            path = self._segments.prompt(request)
            if not self._order.is_bound and (self._made[path] == self._plan).any():
                waiting.append(request)
                self._retries = True
                continue
            cost = int(self._segments.length[path[self._held[path] == 0]].sum())
            if cost > room:
                self.waited += 1
                waiting += self._queue[at:]
                break
            room -= cost + self._begin(request, path, room - cost)
            self._retries = True
        self._queue = waiting

    def _begin(self, request: int, path: Int64s, room: int) -> int:
        """Hold all of it; returns the blocks that are needed for this plan beyond it."""
        found = int(self._present[path].sum())
        # The last token of a prompt is computed in any case, and so its block, for which there is a place till then.
        is_all = found == self._segments.prompt_blocks[request]
        again = found > 0 and bool(is_all or (self._segments.is_repeated_end[path[-1]] and self._present[path[-1]]))
        lent = int(again and room > 0 and not self._order.is_bound)
        self._lent += lent
        self.hits[request] = found - again
        self._made[path[self._present[path] < self._segments.length[path]]] = self._plan
        self._hold(path)
        self._fill(path)
        self._order.admitted(request)
        heapq.heappush(self._running, (max(self._ends[request], self._plan + 1), request))
        return lent

    def _end(self, request: int) -> None:
        """Its answer is over: keep that and let go of the path."""
        path = self._segments.path(request)
        answer = path[len(self._segments.prompt(request)) :]
        if len(answer):
            self._hold(answer)
            if self._num_held <= self._capacity:
                self._fill(answer)
                self._make_room()
            else:
                self._let_go(answer)
                path = self._segments.prompt(request)
        self._order.let_go(path)
        self._let_go(path)
        if len(path):
            self._push_if_idle(int(path[-1]))
        if self._order.may_leave_alone is not None:
            for segment in path[self._order.may_leave_alone[path]].tolist():
                self._push_if_idle(segment)

    def _hold(self, path: Int64s) -> None:
        self._num_held += int(self._segments.length[path[self._held[path] == 0]].sum())
        self._held[path] += 1

    def _let_go(self, path: Int64s) -> None:
        self._held[path] -= 1
        self._num_held -= int(self._segments.length[path[self._held[path] == 0]].sum())

    def _fill(self, path: Int64s) -> None:
        """All of this path's blocks are there now, and some place too few it may be."""
        lacks = path[self._present[path] < self._segments.length[path]]
        if not len(lacks):
            return
        self._children[self._segments.parent[lacks[self._present[lacks] == 0]]] += 1
        self._used += int((self._segments.length[lacks] - self._present[lacks]).sum())
        self._present[lacks] = self._segments.length[lacks]

    def _make_room(self) -> None:
        """Idle blocks leave until there is a place for each that is here."""
        excess = self._used + self._lent - self._capacity
        if excess <= 0:
            return
        self._used -= excess
        # Single elements are read and written through views, which is much faster.
        present, children, keys = self._present.data, self._children.data, self._order.keys.data
        while excess:
            key, _, segment = self._leaving[0]
            if keys[segment] != key or not self._is_leaving(segment):
                heapq.heappop(self._leaving)
                continue
            count = min(present[segment], excess)
            present[segment] -= count
            excess -= count
            if not present[segment]:
                heapq.heappop(self._leaving)
                parent = self._parents[segment]
                children[parent] -= 1
                if parent >= 0:
                    self._push_if_idle(parent)

    def _is_leaving(self, segment: int) -> bool:
        """Some of its blocks can leave."""
        if self._held[segment] or not self._present[segment]:
            return False
        return not self._children[segment] or self._leaves_alone(segment)

    def _leaves_alone(self, segment: int) -> bool:
        alone = self._order.may_leave_alone
        return alone is not None and bool(alone[segment])

    def _push_if_idle(self, segment: int) -> None:
        if self._is_leaving(segment):
            self._push(segment)

    def _push(self, segment: int) -> None:
        entry = (int(self._order.keys[segment]), -int(self._segments.depth[segment]), segment)
        heapq.heappush(self._leaving, entry)


def _plans(times_s: Float64s) -> list[int]:
    """The first plan at each of these times or after it; a microsecond counts for nothing."""
    plans: list[int] = np.ceil(times_s * (1000 / STEP_MS) - 1e-4).astype(np.int64).tolist()
    return plans
