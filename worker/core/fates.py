"""Why blocks that were here are gone: the last of them, for whoever asks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from worker.core.events import KEY_BYTES

REMEMBERED_BLOCKS = 65_536


class Fate(NamedTuple):
    """Blocks dropped together. `keys`: 32 bytes each; `reason`: one of `stats.EVICTION_REASONS`."""

    plan: int
    reason: str
    priority: int
    keys: bytes


class Fates:
    """Forgets the oldest when it knows more than REMEMBERED_BLOCKS blocks."""

    def __init__(self) -> None:
        self._fates: deque[Fate] = deque()
        self._blocks = 0

    def note(self, fate: Fate) -> None:
        self._fates.append(fate)
        self._blocks += len(fate.keys) // KEY_BYTES
        while self._blocks > REMEMBERED_BLOCKS and len(self._fates) > 1:
            self._blocks -= len(self._fates.popleft().keys) // KEY_BYTES

    def of(self, key: bytes) -> Fate | None:
        """What became of this block the last time."""
        for fate in reversed(self._fates):
            at = fate.keys.find(key)
            while at >= 0:
                if at % KEY_BYTES == 0:
                    return fate
                at = fate.keys.find(key, at + 1)
        return None
