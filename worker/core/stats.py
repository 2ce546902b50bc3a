"""What the cache counts: totals since it was made, alike on every rank, and where its pages are now.

Nothing decides by them. Who shows them keeps the totals it last saw and tells the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.tiers import Tier

CAPACITY = "capacity"
BELOW_THRESHOLD = "below_threshold"
NO_COLDER_TIER = "no_colder_tier"
CLEARED = "cleared"
COPY_FAILED = "copy_failed"
TIER_OFF = "tier_off"
EVICTION_REASONS = (CAPACITY, BELOW_THRESHOLD, NO_COLDER_TIER, CLEARED, COPY_FAILED, TIER_OFF)
"""Why a block was dropped: every colder tier was full of what is worth more; its priority was below the cold-tier
threshold; there is no colder tier; it was told to go; a copy of it, or of what it hangs from, failed; its tier, or
that of what it hangs from, was switched off."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """The pages of one tier by state: free, held by a request or a transfer, cached (idle and reusable), or moving.

    They add up to `total`; a page that moves is charged to both tiers: the one it leaves and the one it arrives in.
    `off`: the tier was switched off after its failures.
    """

    total: int = 0
    free: int = 0
    held: int = 0
    cached: int = 0
    moving: int = 0
    off: bool = False


@dataclass(slots=True)
class CacheStats:
    """Totals; they only rise.

    `matched_blocks[tier]`: blocks that admitted requests found there. `uncached_tokens`: prompt tokens that admitted
    requests found nowhere. `evicted_pages`: dropped ones by reason. `moved_pages`: by tier left and tier entered, once
    arrived. `lapsed_blocks`: those whose retention ran out. `copy_failures[tier]`: copies to or from it that some rank
    could not carry out.
    """

    matched_blocks: list[int] = field(default_factory=lambda: [0] * len(Tier))
    uncached_tokens: int = 0
    evicted_pages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTION_REASONS, 0))
    moved_pages: dict[tuple[Tier, Tier], int] = field(default_factory=dict)
    demoted_conversations: int = 0
    demoted_blocks: int = 0
    restored_conversations: int = 0
    restored_blocks: int = 0
    lapsed_blocks: int = 0
    copy_failures: list[int] = field(default_factory=lambda: [0] * len(Tier))

    def moved(self, source: Tier, target: Tier, num_pages: int) -> None:
        """`num_pages` arrived in `target` from `source`."""
        self.moved_pages[source, target] = self.moved_pages.get((source, target), 0) + num_pages
