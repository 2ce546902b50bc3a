"""The free pages of one tier."""

from __future__ import annotations

import numpy as np

from worker.core.arrays import Int32s


class FreePages:
    """A stack: what was given last is taken first, so that every rank takes the same pages and few are touched."""

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._size = num_pages

    def __len__(self) -> int:
        return self._size

    @property
    def view(self) -> Int32s:
        return self._stack[: self._size]

    def take(self, count: int) -> Int32s:
        """`count` pages, of which there must be as many."""
        assert count <= self._size, f"{count} pages taken of {self._size} free ones"
        self._size -= count
        return self._stack[self._size : self._size + count][::-1].copy()

    def give(self, pages: Int32s) -> None:
        """These are free from here on; the first of them is taken first."""
        assert self._size + len(pages) <= len(self._stack), "more pages given back than there are"
        self._stack[self._size : self._size + len(pages)] = pages[::-1]
        self._size += len(pages)

    def restore(self, pages: Int32s) -> None:
        """Exactly these are free, the last of them is taken first."""
        self._stack[: len(pages)] = pages
        self._size = len(pages)
