"""What a plan changed in the cache, as those who follow it from outside need to know.

A block that moves between tiers is removed from one and stored in the other.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from worker.core.arrays import Int32s
from worker.core.tiers import Tier

KEY_BYTES = 32


class Stored(msgspec.Struct, frozen=True):
    """Blocks that follow each other, and each other's keys. `keys`: 32 bytes each; `parent`: the key in front of them,
    which is the scope's own where they begin a prompt (`begins`). `token_ids`: int32, all blocks' tokens."""

    parent: bytes
    keys: bytes
    tier: Tier
    token_ids: Int32s
    begins: bool


class Removed(msgspec.Struct, frozen=True):
    """`keys`: 32 bytes each, blocks that follow each other. They left `tier`."""

    keys: bytes
    tier: Tier


class Updated(msgspec.Struct, frozen=True):
    """The priority of `count` blocks that follow each other, from the key `first` to `last`, changed."""

    first: bytes
    last: bytes
    count: int
    old_priority: int
    new_priority: int


class Cleared(msgspec.Struct, frozen=True):
    """No block of any tier is left."""


CacheEvent: TypeAlias = Stored | Removed | Updated | Cleared


def stand_ins(keys: bytes, tokens_per_block: int) -> Int32s:
    """Tokens that stand for these blocks in a restored tree: alike only where the keys are."""
    words = np.frombuffer(keys, np.int32).reshape(-1, 8)
    repeats = -(-tokens_per_block // 8)
    return np.ascontiguousarray(np.tile(words, (1, repeats))[:, :tokens_per_block]).reshape(-1)
