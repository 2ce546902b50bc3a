"""What LRU would still have: the stack distance of blocks, without a second simulation.

Stack distances are Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def ids_of(blocks: Sequence[tuple[int, int]]) -> Int64s:
    """Every block id of these runs."""
    parts = [np.arange(first, first + count) for first, count in blocks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class LruShadow:
    """Remembers when each path was used last. A leaf-first LRU of any size keeps the blocks used last; of a path, those
    at its beginning. What requests hold counts as any other block."""

    def __init__(self, num_ids: int, num_uses: int) -> None:
        """Block ids are below `num_ids`; paths are used `num_uses` times in all."""
        self._last = np.full(num_ids, -1, np.int32)
        self._place = np.zeros(num_ids, np.int32)
        self._of_use = np.zeros(num_uses, np.int64)
        self._uses = 0

    def use(self, path: Int64s) -> None:
        """These blocks, from the root on, are used now."""
        before, counts = np.unique(self._last[path], return_counts=True)
        first = int(before[0] < 0) if len(before) else 0
        self._of_use[before[first:]] -= counts[first:]
        self._last[path] = self._uses
        self._place[path] = np.arange(len(path))
        self._of_use[self._uses] = len(path)
        self._uses += 1

    def num_kept(self, blocks: Int64s, capacity: int) -> int:
        """How many of these blocks an LRU of that capacity would still have."""
        last = self._last[blocks]
        seen = last >= 0
        if not seen.any():
            return 0
        uses = last[seen]
        oldest = int(uses.min())
        later = np.cumsum(self._of_use[oldest : self._uses][::-1])[::-1]
        above = np.append(later, 0)[uses - oldest + 1]
        # Of the same use, those nearer to the root are kept longer; some of them may have been used again since.
        return int(np.count_nonzero(above + self._place[blocks[seen]] < capacity))
