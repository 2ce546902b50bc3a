"""Which pages lie side by side. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


def stretches(max_pages: int, *columns: Pages) -> Iterator[tuple[int, int]]:
    """Half-open index ranges, in order and at most `max_pages` long, in which every column rises by one a step."""
    total = len(columns[0])
    breaks = np.zeros(max(total - 1, 0), bool)
    for column in columns:
        breaks |= np.diff(column) != 1
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), total]
    for start, stop in itertools.pairwise(edges):
        for first in range(start, stop, max_pages):
            yield first, min(first + max_pages, stop)
