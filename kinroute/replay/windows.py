"""The optimum over one window of a load after the other, each from the cache that LRU had when the window began.

For a worker's recording: it says when there was something to gain, and how much, without knowing more of the future
than the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kinroute.replay.lru import Recency
from kinroute.replay.optimum import NextUse
from kinroute.replay.schedule import certain
from kinroute.replay.segments import Blocks, Role, segments_of
from kinroute.replay.walk import Walk


@dataclass(frozen=True, slots=True)
class Window:
    """Requests [first, first + requests), and how many of their prompts' blocks LRU hits, and the optimum at most."""

    first: int
    requests: int
    prompt_blocks: int
    lru_hits: int
    optimum_hits: int


def windowed(requests: Sequence[Blocks], capacity_blocks: int, *, window: int, role: Role) -> list[Window]:
    """Windows of so many requests, the last one shorter. Those that arrive in one plan are not parted."""
    segments = segments_of(requests, role=role)
    schedule = certain(segments)
    lru = Walk(segments, capacity_blocks, Recency(segments))
    windows: list[Window] = []
    while lru.came < len(requests):
        first = lru.came
        before = lru.forked(Recency(segments))
        lru.run(min(first + window, len(requests)))
        part = slice(first, lru.came)
        best = before.forked(NextUse(segments, capacity_blocks, schedule, start=first, stop=lru.came))
        best.run(lru.came)
        windows.append(
            Window(
                first=first,
                requests=part.stop - first,
                prompt_blocks=int(segments.prompt_blocks[part].sum()),
                lru_hits=int(lru.hits[part].sum()),
                optimum_hits=int((best.hits + schedule.given)[part].sum()),
            )
        )
    return windows
