"""Foreign block ids, made into chained ones: the same blocks behind the same beginning get one id, others another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Uint64s = npt.NDArray[np.uint64]
Runs = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Stretch:
    """Blocks that follow each other on one path: as the file names them, and the first of our ids for them."""

    theirs: Uint64s
    first: int
    after: dict[int, _Stretch] = field(default_factory=dict)
    """By their id of the block that comes next."""

    def cut(self, at: int) -> None:
        """What is behind `at` becomes a stretch of its own."""
        rest = _Stretch(self.theirs[at:], self.first + at, self.after)
        self.theirs = self.theirs[:at]
        self.after = {int(rest.theirs[0]): rest}


class Chains:
    """Every prompt seen so far as one radix tree: 8 bytes a block that is new, whatever repeats costs nothing."""

    def __init__(self) -> None:
        self._begins: dict[int, _Stretch] = {}
        self._ids = 0
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}

    def runs(self, theirs: Iterable[int] | Uint64s) -> Runs:
        """A prompt as runs of our ids."""
        left: Uint64s = np.asarray(theirs, np.uint64)
        found: list[tuple[int, int]] = []
        after = self._begins
        while len(left):
            stretch = after.get(int(left[0]))
            if stretch is None:
                stretch = after[int(left[0])] = _Stretch(left.copy(), self._take(len(left)))
            shared = _shared(stretch.theirs, left)
            if shared < len(stretch.theirs) and shared < len(left):
                stretch.cut(shared)
            _append(found, stretch.first, shared)
            left, after = left[shared:], stretch.after
        return self._kept(found)

    def fresh(self, count: int) -> Runs:
        """Blocks that no other prompt has."""
        return self._kept([(self._take(count), count)] if count else [])

    @property
    def num_ids(self) -> int:
        return self._ids

    def theirs(self) -> Uint64s:
        """By our id, the block as the file names it; 0 for fresh ones."""
        named = np.zeros(self._ids, np.uint64)
        left = list(self._begins.values())
        while left:
            stretch = left.pop()
            named[stretch.first : stretch.first + len(stretch.theirs)] = stretch.theirs
            left.extend(stretch.after.values())
        return named

    def _take(self, count: int) -> int:
        self._ids += count
        return self._ids - count

    def _kept(self, found: list[tuple[int, int]]) -> Runs:
        return tuple(self._runs.setdefault(run, run) for run in found)


def _shared(one: Uint64s, other: Uint64s) -> int:
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    first = int(differ.argmax())
    return first if differ[first] else size


def _append(runs: list[tuple[int, int]], first: int, count: int) -> None:
    if runs and sum(runs[-1]) == first:
        runs[-1] = (runs[-1][0], runs[-1][1] + count)
    else:
        runs.append((first, count))
