"""Copies between tiers that have begun and not ended on every rank, and which pages they use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.core.arrays import Int32s
from worker.core.runs import Hold
from worker.core.tiers import CopyWork, Tier


@dataclass(slots=True, eq=False)
class Copy:
    """`hold`: of a copy to the device, the path to the last block that it loads; None once its blocks are lost.

    The pages that a load leaves belong to it until it has ended. Those that a copy to a colder tier leaves are free at
    once: whoever writes to them next does so behind it.
    """

    work: CopyWork
    hold: Hold | None = None


class Copies:
    """Numbers them, and knows of each page which running copy fills it."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        """`sizes`: pages of each tier."""
        self.running: dict[int, Copy] = {}
        self.num_loads = 0
        self.num_leaving = [0] * len(sizes)
        """Pages of each tier that running loads leave."""
        self.num_to_disk = 0
        self._num_filling = [0] * len(sizes)
        self._number = 0
        self._fills: tuple[npt.NDArray[np.int64], ...] = tuple(np.zeros(size, np.int64) for size in sizes)

    def begin(self, source: Tier, target: Tier, sources: Int32s, targets: Int32s, hold: Hold | None = None) -> CopyWork:
        self._number += 1
        work = CopyWork(self._number, source, target, sources, targets)
        self.running[self._number] = Copy(work, hold)
        self._count(work, 1)
        self._fills[target][targets] = self._number
        return work

    def end(self, number: int) -> tuple[Copy, npt.NDArray[np.bool_]]:
        """The copy, and of which of its targets it was still the one that fills them."""
        copy = self.running.pop(number)
        work = copy.work
        self._count(work, -1)
        fills = self._fills[work.target]
        current = fills[work.targets] == number
        fills[work.targets[current]] = 0
        return copy, current

    def _count(self, work: CopyWork, by: int) -> None:
        self._num_filling[work.target] += by
        if work.target is Tier.DEVICE:
            self.num_loads += by
            self.num_leaving[work.source] += by * len(work.sources)
        elif work.target is Tier.DISK:
            self.num_to_disk += by * len(work.sources)

    def disown(self, tier: Tier, pages: Int32s) -> npt.NDArray[np.bool_]:
        """The blocks in these pages go elsewhere; returns of which pages a running copy fills them, still."""
        if not self._num_filling[tier]:
            return np.zeros(len(pages), np.bool_)
        fills = self._fills[tier]
        filled: npt.NDArray[np.bool_] = fills[pages] != 0
        fills[pages] = 0
        return filled

    def is_filling(self, tier: Tier, pages: Int32s) -> npt.NDArray[np.bool_]:
        filled: npt.NDArray[np.bool_] = self._fills[tier][pages] != 0
        return filled

    def fills(self, tier: Tier, pages: Int32s, number: int) -> npt.NDArray[np.bool_]:
        """Which of these pages copy `number` fills for the block that is in them."""
        fills: npt.NDArray[np.bool_] = self._fills[tier][pages] == number
        return fills

    @property
    def number(self) -> int:
        """Of the last one that began."""
        return self._number

    def restore(self, number: int, running: Sequence[tuple[Copy, npt.NDArray[np.bool_]]]) -> None:
        """Begin with these, each with which of its targets it still fills."""
        self._number = number
        for copy, current in running:
            work = copy.work
            self.running[work.number] = copy
            self._count(work, 1)
            self._fills[work.target][work.targets[current]] = work.number
