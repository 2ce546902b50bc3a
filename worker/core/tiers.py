"""The tiers of a rank's KV memory, warm to cold, and the copies between them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from worker.core.arrays import Int32s


class Tier(enum.IntEnum):
    DEVICE = 0
    HOST = 1
    DISK = 2


TIERS = tuple(Tier)
"""Warm to cold; to walk through them costs less than through the class."""
NUM_TIERS = len(TIERS)
COLD = (Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True)
class CopyWork:
    """Copy page `sources[i]` of tier `source` to page `targets[i]` of tier `target`, on every rank.

    `number` rises from 1 and names the copy. A page may be the target of a copy and then the source of a later one, or
    be written again by a later one: a rank carries out copies that share a page of host or disk in the order of their
    numbers. Pages of the device that a copy reads may be overwritten by the very step that asks for it, which the rank
    orders behind the copy.
    """

    number: int
    source: Tier
    target: Tier
    sources: Int32s
    targets: Int32s


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """One rank is done with copy `number`: its first `good` pages arrived. `why`: what became of the others."""

    number: int
    good: int
    why: str = ""
