"""The clairvoyant optimum: what a cache could hit at best that knows all that will be asked for.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966, on a tree:
what is used again last leaves first, leaf first, a segment from its tail. A prompt that uses a block uses all in front
of it, so of two blocks of one path the deeper one is never used sooner, and the tree binds nothing.

What it bounds. Between the moment when the last request that holds a block lets go of it and the next one that asks for
it, a policy keeps the block or not; a block kept is a hit, and takes one place all that time; what running requests
hold takes the other places, alike under every policy. To give up the block whose next use is farthest whenever there
are too many makes most of such stretches, whatever the number of places at each moment (Faigle and Nawijn, "Note on
scheduling intervals on-line", Discrete Applied Mathematics 58, 1995). So no policy whose requests are admitted and end
when these do hits more blocks over the whole load, requests that overlap included.

What it does not. It speaks of hits of all requests; of those after the warm-up alone it counts what the same schedule
hit, and a policy that gave up hits before them might find a few more. Where requests wait for room (`Walk.waited`) they
run at other times under another policy. Of requests that arrive within one plan and share what is not cached, all but
one begin a plan later in a worker, and here at once. It knows one tier.

It is an upper bound and not always within reach, for one reason: the last block of a prompt is computed even where it
is cached, so that keeping it for that use alone is worth nothing; here it may leave before what hangs below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    walk = Walk(segments, capacity_blocks, NextUse(segments))
    walk.run()
    return counted(segments, walk.hits, warmup)


def counted(segments: Segments, hits: Int64s, warmup: float) -> Bound:
    """`warmup`: the share of the requests that is left out."""
    first = first_counted(segments.num_requests, warmup)
    return Bound(int(segments.prompt_blocks[first:].sum()), int(hits[first:].sum()))


def first_counted(requests: int, warmup: float) -> int:
    return int(requests * warmup)


class NextUse:
    """What is used last leaves first. Of requests [start, stop) it is known what they ask for, of later ones not; those
    before `start` have come."""

    is_bound = True

    def __init__(self, segments: Segments, start: int = 0, stop: int | None = None) -> None:
        self._segments = segments
        self._newest = start - 1
        stop = segments.num_requests if stop is None else stop
        self.may_leave_alone: Bools | None = segments.is_repeated_end
        self._uses, self._gains = self._known_uses(start, stop)
        self.keys = -self._next_use(np.arange(len(segments.length)), self._newest)

    def _known_uses(self, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Uses of a segment by a prompt, as one number each, by segment and then request; and the request, or NEVER
        where it gains nothing by having it."""
        segments = self._segments
        first = segments.starts[start:stop]
        sizes = segments.prompt_ends[start:stop] - first
        where = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        of_request = np.repeat(np.arange(start, stop), sizes)
        used = segments.paths[where]
        is_vain = segments.is_repeated_end[used] & (where == segments.prompt_ends[of_request] - 1)
        order = np.argsort(used, kind="stable")
        uses = (used * segments.num_requests + of_request)[order]
        gains = np.where(is_vain, NEVER, of_request)[order]
        # One more, of no segment, so that there is always a next one.
        return np.append(uses, len(segments.length) * segments.num_requests), np.append(gains, NEVER)

    def _next_use(self, segment: Int64s, request: int) -> Int64s:
        """Who asks for each of these segments next after `request`; NEVER where nobody does, or gains nothing by it."""
        num = self._segments.num_requests
        at = np.searchsorted(self._uses, segment * num + request, side="right")
        return np.where(self._uses[at] // num == segment, self._gains[at], NEVER)

    def admitted(self, request: int) -> None:
        self._newest = request

    def let_go(self, path: Int64s) -> None:
        self.keys[path] = -self._next_use(path, self._newest)
