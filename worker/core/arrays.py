"""A growable array of int32: appending costs what is appended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
EMPTY: Int32s = np.empty(0, np.int32)


class Growing:
    """`view` is what it holds now: valid until the next change, never written to by others."""

    __slots__ = ("_room", "size")

    def __init__(self, values: Int32s) -> None:
        self._room = np.array(values, np.int32)
        self.size = len(values)

    @property
    def view(self) -> Int32s:
        return self._room[: self.size]

    def extend(self, values: Int32s) -> None:
        needed = self.size + len(values)
        if needed > len(self._room):
            room = np.empty(max(needed, 2 * len(self._room), 8), np.int32)
            room[: self.size] = self.view
            self._room = room
        self._room[self.size : needed] = values
        self.size = needed

    def append(self, value: int) -> None:
        if self.size == len(self._room):
            self.extend(np.array([value], np.int32))
        else:
            self._room[self.size] = value
            self.size += 1

    def trim(self, size: int) -> Int32s:
        """Keep the first `size`; returns what was cut off."""
        cut = self._room[size : self.size].copy()
        self.size = size
        return cut

    def compact(self) -> None:
        """Give back most of what it holds beyond its size: what grew is not expected to grow on."""
        if len(self._room) > self.size + (self.size >> 3) + 8:
            self._room = self.view.copy()
