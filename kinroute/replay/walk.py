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

from kinroute.replay.schedule import Schedule, plans_at
from kinroute.replay.segments import Bools, Int64s, Segments


class Order(Protocol):
    """In which order idle segments leave: the lowest of `keys` first, ties deepest first.

    `keys`: [S]. On any path keys may not rise towards the root where `may_leave_alone` is not set; those that it is set
    for leave in their turn whatever hangs below them. `schedule`: a bound's, which waits for nobody and for no room,
    needs no second place for a block that is computed again, and its places only when a plan is over.
    """

    keys: Int64s
    may_leave_alone: Bools | None
    schedule: Schedule | None

    def admitted(self, request: int) -> None:
        """It holds its prompt from now on."""

    def let_go(self, path: Int64s) -> None:
        """A request is over, and only now the keys of what it held may become others."""


class Walk:
    """`hits`: [N], prompt blocks of each request that were there. `came`: requests so far. `waited`: how often a plan
    had no room for a request that was due. `most_held`: blocks that requests held at once.
    """

    def __init__(self, segments: Segments, capacity_blocks: int, order: Order) -> None:
        self._segments = segments
        self._order = order
        self._schedule = order.schedule
        self._capacity = capacity_blocks
        self._length = _lengths(segments, order.schedule)
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
        self._answering: list[tuple[int, int]] = []
        self._queue: list[int] = []
        self._retries = False
        self._plan = -1
        self._arrivals: list[int] = plans_at(segments.arrivals_s).tolist()
        self._ends: list[int] = plans_at(segments.ends_s).tolist()
        self.came = 0
        self.hits = np.zeros(segments.num_requests, np.int64)
        self.waited = self.most_held = 0

    def forked(self, order: Order) -> Walk:
        """Another one that goes on from here, in another order."""
        fork = copy.copy(self)
        fork._order = order
        fork._schedule = order.schedule
        for name in ("_present", "_held", "_children", "_made", "_running", "_queue", "hits"):
            setattr(fork, name, getattr(self, name).copy())
        if order.schedule is not None:
            fork._take_on(order.schedule)
        fork._leaving = []
        fork.waited = 0
        for segment in np.flatnonzero((fork._present > 0) & (fork._held == 0)).tolist():
            fork._push_if_idle(segment)
        return fork

    def _take_on(self, schedule: Schedule) -> None:
        """What is free takes no place any more; who runs will have an answer."""
        self._answering = sorted((int(schedule.answers[request]), request) for _, request in self._running)
        self._length = _lengths(self._segments, schedule)
        parents = self._segments.parent[schedule.is_free & (self._present > 0)]
        np.subtract.at(self._children, parents, 1)
        self._present[schedule.is_free] = 0
        self._used = int(self._present.sum())
        self._num_held = int(self._length[self._held > 0].sum())

    def run(self, until: int | None = None) -> None:
        """Until that many requests have come and none waits; by default until all is over."""
        stop = len(self._arrivals) if until is None else until
        while self.came < stop or self._queue or (until is None and (self._running or self._answering)):
            self._step()

    def _step(self) -> None:
        """The next plan in which something happens."""
        wakes = [self._plan + 1] if self._queue and self._retries else []
        if self.came < len(self._arrivals):
            wakes.append(self._arrivals[self.came])
        wakes += [due[0][0] for due in (self._running, self._answering) if due]
        self._plan = max(self._plan + 1, min(wakes))
        self._lent = 0
        while self._running and self._running[0][0] <= self._plan:
            self._end(heapq.heappop(self._running)[1])
        while self._answering and self._answering[0][0] <= self._plan:
            self._answered(heapq.heappop(self._answering)[1])
        while self.came < len(self._arrivals) and self._arrivals[self.came] <= self._plan:
            self._queue.append(self.came)
            self.came += 1
        if self._queue:
            self._admit()
            self.most_held = max(self.most_held, self._num_held)
        self._make_room()

    def _admit(self) -> None:
        waiting: list[int] = []
        room = self._capacity - self._num_held - len(self._running)
        self._retries = False
        for at, request in enumerate(self._queue):
            if self._segments.prompt_blocks[request] > self._capacity:
                continue
            path = self._segments.prompt(request)
            if self._waits(request, path):
                waiting.append(request)
                self._retries = True
                continue
            cost = int(self._length[path[self._held[path] == 0]].sum())
            if cost > room and self._schedule is None:
                self.waited += 1
                waiting += self._queue[at:]
                break
            room -= cost + self._begin(request, path, room - cost)
            self._retries = True
        self._queue = waiting

    def _waits(self, request: int, path: Int64s) -> bool:
        if self._schedule is not None:
            return bool(self._schedule.starts[request] > self._plan)
        return bool((self._made[path] == self._plan).any())

    def _begin(self, request: int, path: Int64s, room: int) -> int:
        """Hold all of it; returns the blocks that are needed for this plan beyond it."""
        found = int(self._present[path].sum())
        # The last token of a prompt is computed in any case, and so its block, for which there is a place till then.
        last = path[-1]
        again = bool(self._present[last] and self._present[last] == self._length[last])
        lent = int(again and room > 0 and self._schedule is None)
        self._lent += lent
        self.hits[request] = found - again
        self._made[path[self._present[path] < self._length[path]]] = self._plan
        self._hold(path)
        self._fill(path)
        self._order.admitted(request)
        heapq.heappush(self._running, (max(self._ends[request], self._plan + 1), request))
        if self._schedule is not None:
            heapq.heappush(self._answering, (int(self._schedule.answers[request]), request))
        return lent

    def _end(self, request: int) -> None:
        """Its answer is over: keep that and let go of the path."""
        if self._schedule is not None:
            self._give_up(self._segments.prompt(request))
            return
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
        self._give_up(path)

    def _answered(self, request: int) -> None:
        """In a bound: its answer is kept, and nobody holds it."""
        answer = self._segments.path(request)[len(self._segments.prompt(request)) :]
        if len(answer):
            self._hold(answer)
            self._fill(answer)
            self._give_up(answer)

    def _give_up(self, path: Int64s) -> None:
        self._order.let_go(path)
        self._let_go(path)
        if len(path):
            self._push_if_idle(int(path[-1]))
        if self._order.may_leave_alone is not None:
            for segment in path[self._order.may_leave_alone[path]].tolist():
                self._push_if_idle(segment)

    def _hold(self, path: Int64s) -> None:
        self._num_held += int(self._length[path[self._held[path] == 0]].sum())
        self._held[path] += 1

    def _let_go(self, path: Int64s) -> None:
        self._held[path] -= 1
        self._num_held -= int(self._length[path[self._held[path] == 0]].sum())

    def _fill(self, path: Int64s) -> None:
        """All of this path's blocks are there now, and some place too few it may be."""
        lacks = path[self._present[path] < self._length[path]]
        if not len(lacks):
            return
        self._children[self._segments.parent[lacks[self._present[lacks] == 0]]] += 1
        self._used += int((self._length[lacks] - self._present[lacks]).sum())
        self._present[lacks] = self._length[lacks]

    def _make_room(self) -> None:
        """Idle blocks leave until there is a place for each that is here."""
        excess = self._used + self._lent - self._capacity
        if excess <= 0:
            return
        # Single elements are read and written through views, which is much faster.
        present, children, keys = self._present.data, self._children.data, self._order.keys.data
        while excess and self._leaving:
            key, _, segment = self._leaving[0]
            if keys[segment] != key or not self._is_leaving(segment):
                heapq.heappop(self._leaving)
                continue
            count = min(present[segment], excess)
            present[segment] -= count
            excess -= count
            self._used -= count
            if not present[segment]:
                heapq.heappop(self._leaving)
                parent = self._parents[segment]
                children[parent] -= 1
                if parent >= 0:
                    self._push_if_idle(parent)
        assert not excess or self._schedule is not None, "requests hold more than there are places"

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


def _lengths(segments: Segments, schedule: Schedule | None) -> Int64s:
    return segments.length if schedule is None else np.where(schedule.is_free, 0, segments.length)
