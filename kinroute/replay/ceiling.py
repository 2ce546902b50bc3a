"""What a cache without end would hit: all that was ever there."""

from __future__ import annotations

from collections.abc import Sequence

from kinroute.replay.lru import Recency
from kinroute.replay.optimum import Bound, counted
from kinroute.replay.segments import Blocks, Role, Segments, segments_of
from kinroute.replay.walk import Walk


def ceiling(requests: Sequence[Blocks], *, role: Role, warmup: float) -> Bound:
    """A prompt counts as there when it is prefilled, an answer when it is over; who comes while a common prompt is
    being prefilled waits for it. The last block of a prompt is computed even where all of it is cached.
    """
    return ceiling_of(segments_of(requests, role=role), warmup=warmup)


def ceiling_of(segments: Segments, *, warmup: float) -> Bound:
    walk = Walk(segments, endless(segments), Recency(segments))
    walk.run()
    return counted(segments, walk.hits, warmup)


def endless(segments: Segments) -> int:
    """A capacity in which nothing ever has to leave."""
    return int(segments.length.sum()) + 2 * segments.num_requests + 1
