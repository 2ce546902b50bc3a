"""Waiting work of several tenants, who take turns: where edges make prompts ready, and where workers admit them.

Start-time fair queueing. Each tenant has a start: how much it was served, in tokens; whoever has the lowest goes next,
and its start rises by what that cost. A tenant that comes begins where the others are on average, so it neither catches
up on what it never asked for nor waits behind what others piled up. The average rises with every turn however many new
tenants come, so who is ahead of it is reached: each waits for a bounded amount of others' work. Pure; whole numbers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ROOM = 4
"""A tenant may have so many times as much waiting as there is room left: alone four fifths of all, so that there is
room for others, and again for others beside several that flood."""
SPARE_LINES = 64

Item = TypeVar("Item")


@dataclass(slots=True)
class _Line(Generic[Item]):
    """One tenant's work, (arrival, item, cost) each. `turn`: when it was served last."""

    start: int
    turn: int = 0
    cost: int = 0
    waiting: deque[tuple[int, Item, int]] = field(default_factory=deque)


class FairQueue(Generic[Item]):
    """`push` what waits, look at it in the `order` that is due, and `take` what begins, or `drop` what is not wanted.

    A tenant is any name; within one, what came first is due first.
    """

    def __init__(self) -> None:
        self._lines: dict[bytes, _Line[Item]] = {}
        self._busy = 0
        self._mean = 0
        self._turns = 0
        self._arrivals = 0
        self._len = 0
        self._cost = 0

    def __len__(self) -> int:
        return self._len

    @property
    def cost(self) -> int:
        """Of all that waits."""
        return self._cost

    def costs(self) -> dict[bytes, int]:
        """Of what waits of each tenant that has any, those first whose names came first."""
        return {tenant: line.cost for tenant, line in self._lines.items() if line.waiting}

    def waiting(self, tenant: bytes) -> int:
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.waiting)

    def has_room(self, tenant: bytes, bound: int) -> bool:
        """Whether one more of this tenant may wait where `bound` may in all."""
        return within_share(self.waiting(tenant), bound - self._len)

    def push(self, tenant: bytes, item: Item, cost: int) -> None:
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._mean)
        if not line.waiting:
            line.start = max(line.start, self._mean)
            self._busy += 1
        self._arrivals += 1
        line.waiting.append((self._arrivals, item, cost))
        line.cost += cost
        self._len += 1
        self._cost += cost

    def order(self, without: Collection[bytes] = ()) -> Iterator[tuple[bytes, Item]]:
        """What waits, in the order that is due. The one just given may be taken or dropped meanwhile, no other; what is
        left waiting is passed over, as is all of tenants in `without`, which may grow meanwhile."""
        passed = dict.fromkeys(self._lines, 0)
        heap = [
            (line.start, line.turn, line.waiting[0][0], tenant) for tenant, line in self._lines.items() if line.waiting
        ]
        heapq.heapify(heap)
        while heap:
            tenant = heap[0][3]
            if tenant in without:
                heapq.heappop(heap)
                continue
            line = self._lines[tenant]
            arrival, item, _ = line.waiting[passed[tenant]]
            yield tenant, item
            at = passed[tenant]
            if at < len(line.waiting) and line.waiting[at][0] == arrival:
                at = passed[tenant] = at + 1
            if at < len(line.waiting):
                heapq.heapreplace(heap, (line.start, line.turn, line.waiting[at][0], tenant))
            else:
                heapq.heappop(heap)

    def take(self, tenant: bytes, item: Item, cost: int | None = None) -> None:
        """It begins, and the tenant's next turn comes so much later as it costs: `cost`, where it is another after all
        than was thought."""
        line = self._lines[tenant]
        cost = max(1, self._cost_of(line, item) if cost is None else cost)
        self._turns += 1
        self._mean = max(self._mean + -(-cost // self._busy), line.start)
        line.start += cost
        line.turn = self._turns
        self._remove(tenant, line, item)

    def charge(self, tenant: bytes, cost: int) -> None:
        """What it took costs more than was thought. Nothing to one that nobody is waiting beside."""
        line = self._lines.get(tenant)
        if line is not None:
            line.start += cost

    def drop(self, tenant: bytes, item: Item) -> None:
        """It is not wanted any more: nobody had a turn."""
        self._remove(tenant, self._lines[tenant], item)

    @staticmethod
    def _cost_of(line: _Line[Item], item: Item) -> int:
        return next(cost for _, waiting, cost in line.waiting if waiting is item)

    def _remove(self, tenant: bytes, line: _Line[Item], item: Item) -> None:
        at = next(at for at, (_, waiting, _) in enumerate(line.waiting) if waiting is item)
        cost = line.waiting[at][2]
        del line.waiting[at]
        line.cost -= cost
        self._cost -= cost
        self._len -= 1
        if line.waiting:
            return
        self._busy -= 1
        if not self._busy:
            # Nobody waits, so nobody is ahead of anybody.
            self._lines.clear()
        elif line.start <= self._mean:
            del self._lines[tenant]
        elif len(self._lines) > 2 * self._busy + SPARE_LINES:
            kept = {name: one for name, one in self._lines.items() if one.waiting or one.start > self._mean}
            if len(kept) > 2 * self._busy + SPARE_LINES:
                kept = {name: one for name, one in kept.items() if one.waiting}
            self._lines = kept


def within_share(waiting: int, room: int) -> bool:
    """Whether a tenant that has `waiting` may have more of the `room` that is left for all."""
    return waiting < ROOM * room
