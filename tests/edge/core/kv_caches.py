"""A worker's cache as the tests model it: one entry a block, and what it would tell of each change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from edge.core.kv_index import Change, Cleared, Removed, Stored
from edge.core.resident import Held

SCOPE = b"s" * 32
TIERS = (Held.DEVICE, Held.HOST, Held.DISK)


def key_of(path: Sequence[int]) -> bytes:
    """Of the last block of `path`; each block is one number here."""
    return hashlib.sha256(bytes(path)).digest() if path else SCOPE


def keys_of(path: Sequence[int], start: int = 0) -> bytes:
    return b"".join(key_of(path[: end + 1]) for end in range(start, len(path)))


class ModelCache:
    """Which paths are there, each with the tier of its last block. Tiers only get colder from root to leaf."""

    def __init__(self) -> None:
        self.tiers: dict[tuple[int, ...], Held] = {}

    def longest(self, path: Sequence[int]) -> int:
        return next((length for length in range(len(path)) if tuple(path[: length + 1]) not in self.tiers), len(path))

    def store(self, path: Sequence[int]) -> list[Change]:
        """What is not there yet goes to the device, behind what of it is."""
        have = self.longest(path)
        if have == len(path) or (have and self.tiers[tuple(path[:have])] is not Held.DEVICE):
            return []
        for end in range(have, len(path)):
            self.tiers[tuple(path[: end + 1])] = Held.DEVICE
        return [Stored(key_of(path[:have]), keys_of(path, have), Held.DEVICE, not have)]

    def below(self, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All that begins with `path`, longest first."""
        return sorted((one for one in self.tiers if one[: len(path)] == path), key=lambda one: (-len(one), one))

    def drop(self, path: tuple[int, ...]) -> list[Change]:
        """With all that hangs below it."""
        return [Removed(key_of(one), self.tiers.pop(one)) for one in self.below(path)]

    def cool(self, path: tuple[int, ...], tier: Held) -> list[Change]:
        """With all that hangs below it, where that is warmer."""
        changes: list[Change] = []
        for one in self.below(path):
            before = self.tiers[one]
            if before < tier:
                self.tiers[one] = tier
                changes += [Removed(key_of(one), before), self._stored(one)]
        return changes

    def warm(self, path: tuple[int, ...]) -> list[Change]:
        """Back to the device, from the root on."""
        changes: list[Change] = []
        for end in range(1, len(path) + 1):
            one = path[:end]
            before = self.tiers[one]
            if before is not Held.DEVICE:
                self.tiers[one] = Held.DEVICE
                changes += [Removed(key_of(one), before), self._stored(one)]
        return changes

    def clear(self) -> list[Change]:
        self.tiers.clear()
        return [Cleared()]

    def snapshot(self) -> list[Change]:
        return [self._stored(one) for one in sorted(self.tiers, key=lambda one: (len(one), one))]

    def _stored(self, path: tuple[int, ...]) -> Stored:
        return Stored(key_of(path[:-1]), key_of(path), self.tiers[path], len(path) == 1)
