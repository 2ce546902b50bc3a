"""Ages of idle conversations, in buckets of a quarter octave: fine where much happens, coarse where little is known."""

from __future__ import annotations

import bisect

FIRST_MS = 250
"""Upper edge of the first bucket."""
PER_OCTAVE = 4
NUM_BUCKETS = 60
EDGES_MS = (0, *(round(FIRST_MS * 2 ** (step / PER_OCTAVE)) for step in range(NUM_BUCKETS - 1)))
"""Where each bucket begins; the last one, which begins at an hour and a half, never ends."""


def bucket_of(age_ms: int) -> int:
    return bisect.bisect_right(EDGES_MS, age_ms) - 1
