"""A growable array of int32, appending to which costs what is appended; and values that follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
T = TypeVar("T")
EMPTY: Int32s = np.empty(0, np.int32)


class Growing:
    """`view` is what it holds now, `size` values: valid until the next change, changed by nobody but its owner."""

    __slots__ = ("_room", "size", "view")

    def __init__(self, values: Int32s, spare: int = 0) -> None:
        """A copy of `values`, with room for `spare` more."""
        size = len(values)
        self._room = np.empty(size + spare, np.int32)
        self.size = size
        self.view: Int32s = self._room[:size]
        self.view[:] = values

    @classmethod
    def on(cls, values: Int32s) -> Self:
        """Made of `values` themselves, which nobody changes from here on; no copy before it grows."""
        growing = cls.__new__(cls)
        growing._room = growing.view = values
        growing.size = len(values)
        return growing

    def extend(self, values: Int32s) -> None:
        """Room grows by an eighth at least, so that little of it is ever empty."""
        needed = self.size + len(values)
        if needed > len(self._room):
            room = np.empty(needed + (needed >> 3) + 8, np.int32)
            room[: self.size] = self.view
            self._room = room
        self._room[self.size : needed] = values
        self.size = needed
        self.view = self._room[:needed]

    def append(self, value: int) -> None:
        if self.size == len(self._room):
            self.extend(np.array([value], np.int32))
        else:
            self._room[self.size] = value
            self.size += 1
            self.view = self._room[: self.size]

    def trim(self, size: int) -> None:
        """Keep the first `size`."""
        self.size = size
        self.view = self._room[:size]


def alike(values: Sequence[T]) -> Iterator[tuple[T, int, int]]:
    """Each value and its places, [start, stop): equal ones that follow each other are one."""
    start = 0
    for stop, value in enumerate(values):
        if value != values[start]:
            yield values[start], start, stop
            start = stop
    if values:
        yield values[start], start, len(values)
