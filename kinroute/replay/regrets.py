"""What a policy gave up that LRU would have kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kinroute.replay.lru import Recency
from kinroute.replay.segments import Blocks, Int64s, Role, segments_of
from kinroute.replay.walk import Walk


def regretted(requests: Sequence[Blocks], hits: Int64s, capacity_blocks: int, *, role: Role) -> Int64s:
    """For each request how many blocks of its prompt were not there that LRU, with a cache of so many blocks and the
    same arrivals and ends, would still have had. `hits`: [N], the blocks of its prompt that it found.
    """
    segments = segments_of(requests, role=role)
    lru = Walk(segments, capacity_blocks, Recency(segments))
    lru.run()
    missed: Int64s = np.maximum(lru.hits - hits, 0)
    return missed
