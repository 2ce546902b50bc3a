"""The parts of the run tree: runs, the holds that keep them, and what a match finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from worker.core.arrays import Growing
from worker.core.eviction import Entry, Stamp
from worker.core.stretches import Stretches
from worker.core.tiers import NUM_TIERS, Tier

if TYPE_CHECKING:
    from worker.core.returns.claims import Claim


@dataclass(slots=True, eq=False)
class Run:
    """`length` blocks below `parent`, `start` blocks behind the beginning of the prompt.

    `tokens` are little-endian int32. A root has length 0, no parent, and in `keys` the key of its scope; else `keys`
    holds each block's key, and `pages` its page in the tier that it is in. `ends[t]`: where its blocks in tier t or
    warmer end; tiers get colder along it. `number`: in the order of making, the same on every rank. `stamp`: when a
    path through it was last let go. `held_children`: children that some hold needs, in them or below. `held_length`:
    its blocks that some hold covers. `first_tiers[t]`: children whose first block is in tier t. `below`: how many
    children have which `top`, the highest priority of a run and all below it. `entries[t]`: what stands for it in tier
    t's eviction order. `children`: by the tokens of their first blocks; `newest`: the last of them, tried first.
    `claim`: whose latest path led here, and `value` what that makes it worth, where the return index says so.
    """

    number: int
    parent: Run | None
    start: int
    tokens: bytearray
    pages: Growing
    keys: bytearray
    stretches: Stretches
    stamp: Stamp
    ends: list[int]
    children: dict[bytes, Run] = field(default_factory=dict)
    newest: Run | None = None
    holds: list[Hold] = field(default_factory=list)
    held_children: int = 0
    held_length: int = 0
    first_tiers: list[int] = field(default_factory=lambda: [0] * NUM_TIERS)
    below: dict[int, int] = field(default_factory=dict)
    top: int = -1
    entries: list[Entry | None] = field(default_factory=lambda: [None] * NUM_TIERS)
    scope: bytes = b""
    claim: Claim | None = None
    value: int = 0

    @property
    def length(self) -> int:
        return self.pages.size

    @property
    def is_held(self) -> bool:
        return bool(self.holds) or self.held_children > 0

    @property
    def first_tier(self) -> Tier:
        return Tier.DEVICE if self.ends[0] else Tier.HOST if self.ends[1] else Tier.DISK

    def span(self, tier: Tier) -> tuple[int, int]:
        """Its blocks in this tier: [start, stop)."""
        return (self.ends[tier - 1] if tier else 0), self.ends[tier]

    def idle(self, tier: Tier) -> int:
        """Its blocks of this tier that no hold covers."""
        start, stop = self.span(tier)
        return max(0, stop - max(start, self.held_length))

    def tier_of(self, block: int) -> Tier:
        return next(tier for tier in Tier if block < self.ends[tier])

    def effective(self, tier: Tier) -> int:
        """The priority that counts for its last block in this tier: the highest from there down, on any path."""
        own = self.stretches.top(self.ends[tier] - 1)
        return max(own, *self.below) if self.below else own

    def is_evictable(self, tier: Tier) -> bool:
        """Some of its blocks can leave this tier: nobody holds them, and nothing below is as warm."""
        return self.idle(tier) > 0 and not any(self.first_tiers[: tier + 1])

    def key(self, block: int) -> bytes:
        return bytes(self.keys[32 * block : 32 * block + 32])

    def key_before(self, block: int) -> bytes:
        """What stands in front of `block`: a block's key, or the scope's."""
        if block or self.parent is None:
            return bytes(self.keys[32 * block - 32 : 32 * block]) if block else bytes(self.keys)
        return bytes(self.parent.keys[-32:])


@dataclass(slots=True, eq=False)
class Hold:
    """Keeps the path from the root to the first `length` blocks of `run`."""

    run: Run
    length: int

    @property
    def blocks(self) -> int:
        """Of the whole path."""
        return self.run.start + self.length


class Segment(msgspec.Struct, frozen=True):
    """Blocks [start, stop) of `run`."""

    run: Run
    start: int
    stop: int


class Match(msgspec.Struct, frozen=True):
    """The longest committed prefix: it ends after `length` blocks of `run`, `blocks` blocks from where it began.

    `run` None: the scope has no root yet.
    """

    run: Run | None
    length: int
    blocks: int


NOTHING = Match(None, 0, 0)


class PartMatch(msgspec.Struct, frozen=True):
    """A match ends inside this block: the first `tokens` tokens of block `index` of `run` are the ones wanted."""

    run: Run
    index: int
    tokens: int
