"""The clairvoyant optimum: what a cache could hit at best that knows all that will be asked for.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966, on a tree:
what is used again last leaves first, leaf first, a segment from its tail. A prompt that uses a block uses all in front
of it, so of two blocks of one path the deeper one is never used sooner, and the tree binds nothing.

What it bounds: the hits of the counted requests under every policy of one tier under which nobody waits for room.
Between the moment when the last request that holds a block lets go of it and the next one that asks for it, a policy
keeps the block or not; a block kept is a hit, and takes one place all that time; what running requests hold takes the
other places. Of both only that part is counted which takes a place under every policy (`schedule.certain`): a request
may begin some plans after it came, but under any policy it holds its prompt from `starts` to `ends`. So what a policy
keeps fits here too, and a stretch in which it has a block, with all who use it then, has at most one miss here too.
To give up the block whose next use is farthest whenever there are too many makes most of the stretches between uses,
whatever the number of places at each moment (Faigle and Nawijn, "Note on scheduling intervals on-line", Discrete
Applied Mathematics 58, 1995); those that end with a request that is not counted are worth nothing.

What it does not. Where requests wait for room they run at other times; it takes them to begin all the same. It knows
one tier.

It is not always within reach: besides those plans, blocks may leave before what hangs below them where that is worth
something, which is so for the last block of a prompt, computed even where it is cached, and before the warm-up is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kinroute.replay.schedule import Schedule, certain
from kinroute.replay.segments import Blocks, Bools, Int64s, Role, Segments, segments_of
from kinroute.replay.walk import Walk

NEVER = 2**40
"""Later than any request."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Prompt blocks of the requests after the warm-up, and how many of them are hits at most."""

    prompt_blocks: int
    hit_blocks: int


def optimum(requests: Sequence[Blocks], capacity_blocks: int, *, role: Role, warmup: float) -> Bound:
    """At most so many hits has a device tier of that many blocks, whatever its policy knows."""
    return optimum_of(segments_of(requests, role=role), capacity_blocks, warmup=warmup)


def optimum_of(segments: Segments, capacity_blocks: int, *, warmup: float) -> Bound:
    schedule = certain(segments)
    first = first_counted(segments.num_requests, warmup)
    walk = Walk(segments, capacity_blocks, NextUse(segments, capacity_blocks, schedule, counted_from=first))
    walk.run()
    return counted(segments, walk.hits + schedule.given, warmup)


def counted(segments: Segments, hits: Int64s, warmup: float) -> Bound:
    """`warmup`: the share of the requests that is left out."""
    first = first_counted(segments.num_requests, warmup)
    return Bound(int(segments.prompt_blocks[first:].sum()), int(hits[first:].sum()))


def first_counted(requests: int, warmup: float) -> int:
    return int(requests * warmup)


class NextUse:
    """What is used last leaves first. Of requests [start, stop) it is known what they ask for, of later ones not; those
    before `start` have come. Hits count from `counted_from` on. A prompt larger than the cache asks nothing.
    """

    def __init__(
        self,
        segments: Segments,
        capacity_blocks: int,
        schedule: Schedule,
        *,
        start: int = 0,
        stop: int | None = None,
        counted_from: int = 0,
    ) -> None:
        self.schedule: Schedule | None = schedule
        self._segments = segments
        self._counted_from = counted_from
        stop = segments.num_requests if stop is None else stop
        by_start = np.argsort(schedule.starts[start:stop], kind="stable")
        self._turns = np.full(segments.num_requests, -1, np.int64)
        self._turns[start + by_start] = np.arange(stop - start)
        self._newest = -1
        known = start + np.flatnonzero(segments.prompt_blocks[start:stop] <= capacity_blocks)
        self._uses, self._gains = self._known_uses(known)
        self.may_leave_alone: Bools | None = segments.is_repeated_end.copy()
        self.may_leave_alone[segments.paths[: segments.starts[counted_from]]] = True
        self.keys = -self._next_use(np.arange(len(segments.length)))

    def _known_uses(self, known: Int64s) -> tuple[Int64s, Int64s]:
        """Uses of a segment by a prompt, as one number each, by segment and then turn; and the turn, or NEVER where
        nothing is gained by having it."""
        segments = self._segments
        first = segments.starts[known]
        sizes = segments.prompt_ends[known] - first
        where = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        of_request = np.repeat(known, sizes)
        used, turns = segments.paths[where], self._turns[of_request]
        is_vain = segments.is_repeated_end[used] & (where == segments.prompt_ends[of_request] - 1)
        is_vain |= of_request < self._counted_from
        uses = used * segments.num_requests + turns
        order = np.argsort(uses)
        # One more, of no segment, so that there is always a next one.
        return (
            np.append(uses[order], len(segments.length) * segments.num_requests),
            np.append(np.where(is_vain, NEVER, turns)[order], NEVER),
        )

    def _next_use(self, segment: Int64s) -> Int64s:
        """Whose turn it is next to ask for each of these segments; NEVER where nobody does, or gains nothing by it."""
        num = self._segments.num_requests
        at = np.searchsorted(self._uses, segment * num + self._newest, side="right")
        return np.where(self._uses[at] // num == segment, self._gains[at], NEVER)

    def admitted(self, request: int) -> None:
        self._newest = max(self._newest, int(self._turns[request]))

    def let_go(self, path: Int64s) -> None:
        self.keys[path] = -self._next_use(path)
