"""Which blocks one worker holds, in arrays: 9 bytes a block, and no more blocks than the bound allows."""

from __future__ import annotations

import enum
from bisect import bisect_left
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
BLOCK_BYTES = 9
Prints: TypeAlias = npt.NDArray[np.uint64]
"""A fingerprint for each block, in order: the first 8 bytes of its key. Two keys with one fingerprint would misplace a
request at worst."""

MIN_MERGE = 512
PIN_LEVELS = 6


class Held(enum.IntFlag):
    """`UNSURE`: in some tier. `TAIL`: the last block of what was stored together. `FORK`: several go on there."""

    DEVICE = 1
    HOST = 2
    DISK = 4
    UNSURE = 8
    TAIL = 16
    FORK = 32


ANYWHERE = int(Held.DEVICE | Held.HOST | Held.DISK | Held.UNSURE)
PINNED = int(Held.TAIL | Held.FORK)


def prints_of(keys: bytes) -> Prints:
    """`keys`: 32 bytes each."""
    return np.frombuffer(keys, "<u8")[:: KEY_BYTES // 8].astype(np.uint64)


class ResidentBlocks:
    """Exact while there are at most `max_blocks`. With more, it remembers every second block, every fourth, and so on,
    and beside them the ends of runs and the forks, where prompts part: what it finds may be a few blocks short.

    A worker keeps no block without those in front of it; so whether a block is there says the same of them.
    Blocks lie in a sorted array, the latest in a small dict that is merged into it now and then.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.clear()

    def clear(self) -> None:
        self.level = 0
        """Remembered are, beside ends and forks, blocks whose fingerprint has this many low bits 0."""
        self._prints: Prints = np.empty(0, np.uint64)
        self._view = self._prints.data
        self._held: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._num_dead = 0
        self._new: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._prints) - self._num_dead + len(self._new)

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        return self._prints.nbytes + self._held.nbytes

    def stored(self, parent: bytes, keys: bytes, tier: Held, *, begins: bool) -> bool:
        """Blocks that follow each other, behind `parent`. False: it should be there, and is not known."""
        prints = prints_of(keys)
        known = begins or self._extend(int.from_bytes(parent[:8], "little"))
        bits = np.full(len(prints), int(tier), np.uint8)
        bits[-1:] |= int(Held.TAIL)
        if self.level:
            keep = self._is_kept(prints, bits)
            prints, bits = prints[keep], bits[keep]
        at, found = self._find(prints)
        self._num_dead -= int(np.count_nonzero(self._held[at[found]] == 0))
        self._held[at[found]] |= bits[found]
        for one, bit in zip(prints[~found].tolist(), bits[~found].tolist(), strict=True):
            self._new[one] = self._new.get(one, 0) | bit
        if len(self._new) > max(MIN_MERGE, len(self._prints) >> 5) or len(self) > self._max_blocks:
            self._merge()
        return known

    def removed(self, keys: bytes, tier: Held) -> None:
        """Unknown ones do no harm."""
        prints = prints_of(keys)
        left = np.uint8(0xFF & ~int(tier | Held.UNSURE))
        at, found = self._find(prints)
        at = at[found]
        was_dead = int(np.count_nonzero(self._held[at] == 0))
        held = self._held[at] & left
        held[(held & ANYWHERE) == 0] = 0
        self._held[at] = held
        self._num_dead += int(np.count_nonzero(held == 0)) - was_dead
        if self._new:
            for one in prints[~found].tolist():
                if one in self._new:
                    self._new[one] &= int(left)
                    if not self._new[one] & ANYWHERE:
                        del self._new[one]
        if self._num_dead > max(MIN_MERGE, len(self._prints) >> 1):
            self._merge()

    def longest(self, prints: Prints, tiers: int = ANYWHERE) -> int:
        """How many of a prompt's blocks, from its first on, are in one of `tiers`. About 13 probes for 4,000 blocks."""
        if not self.level:
            return self._count(prints, tiers)
        sampled = np.flatnonzero((prints & np.uint64((1 << self.level) - 1)) == 0)
        count = self._count(prints[sampled], tiers)
        first = int(sampled[count - 1]) + 1 if count else 0
        stop = int(sampled[count]) if count < len(sampled) else len(prints)
        for index in range(stop - 1, first - 1, -1):
            if self._get(int(prints[index])) & tiers:
                return index + 1
        return first

    def _count(self, prints: Prints, tiers: int) -> int:
        low, high = 0, len(prints)
        while low < high:
            middle = (low + high) // 2
            if self._get(int(prints[middle])) & tiers:
                low = middle + 1
            else:
                high = middle
        return low

    def _get(self, one: int) -> int:
        held = self._new.get(one)
        if held is not None:
            return held
        at = bisect_left(self._view, one)
        return int(self._held[at]) if at < len(self._view) and self._view[at] == one else 0

    def _extend(self, parent: int) -> bool:
        """Something goes on behind `parent`: an end is none any more, anything else is a fork now."""
        held = self._get(parent)
        if not held & ANYWHERE:
            if not self.level:
                return False
            # It is there, but was not worth remembering until now.
            held = int(Held.UNSURE | Held.FORK)
        elif held & PINNED == Held.TAIL:
            held &= ~int(Held.TAIL)
        else:
            held |= int(Held.FORK)
        self._put(parent, held)
        return True

    def _put(self, one: int, held: int) -> None:
        at = bisect_left(self._view, one)
        if at < len(self._view) and self._view[at] == one:
            self._num_dead -= not self._held[at]
            self._held[at] = held
        else:
            self._new[one] = held

    def _find(self, prints: Prints) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Where each lies in the sorted array, and whether it does."""
        at = np.searchsorted(self._prints, prints)
        inside = at < len(self._prints)
        found = inside.copy()
        found[inside] = self._prints[at[inside]] == prints[inside]
        return at, found

    def _merge(self) -> None:
        """One sorted array of all that is there, thinned out until it is within the bound."""
        alive = self._held != 0
        prints, held = self._prints[alive], self._held[alive]
        new = np.fromiter(self._new.keys(), np.uint64, len(self._new))
        order = np.argsort(new)
        new = new[order]
        new_held = np.fromiter(self._new.values(), np.uint8, len(self._new))[order]
        at = np.searchsorted(prints, new)
        prints, held = np.insert(prints, at, new), np.insert(held, at, new_held)
        while len(prints) > self._max_blocks:
            self.level += 1
            keep = self._is_kept(prints, held)
            prints, held = prints[keep], held[keep]
        self._prints, self._held = prints, held
        self._view = prints.data
        self._num_dead = 0
        self._new = {}

    def _is_kept(self, prints: Prints, held: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """At this level; ends and forks are kept `PIN_LEVELS` longer."""
        sampled = (prints & np.uint64((1 << self.level) - 1)) == 0
        pinned = (prints & np.uint64((1 << max(0, self.level - PIN_LEVELS)) - 1)) == 0
        kept: npt.NDArray[np.bool_] = sampled | (pinned & ((held & PINNED) != 0))
        return kept
