"""Copies between tiers that every rank of the group carries out for itself. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.core.tiers import CopyEnded, CopyWork, Tier

FAILURES_UNTIL_OFF = 3


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A copy is over on every rank; its first `good` pages arrived on all of them.

    `failures`: (rank, why) of those that lack some. `tier`: the coldest one that it touched. `off`: it has now failed
    too often on some rank, for the first time.
    """

    number: int
    good: int
    tier: Tier
    failures: tuple[tuple[int, str], ...] = ()
    off: bool = False


@dataclass(slots=True)
class _Running:
    tier: Tier
    good: int
    ranks: set[int] = field(default_factory=set)
    failures: list[tuple[int, str]] = field(default_factory=list)


class CopyBoard:
    """Waits for the last rank, as until then pages are read and written."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._running: dict[int, _Running] = {}
        self._failed: Counter[tuple[int, Tier]] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def began(self, copies: Sequence[CopyWork]) -> None:
        """Before any rank may report on them."""
        for copy in copies:
            self._running[copy.number] = _Running(max(copy.source, copy.target), len(copy.targets))

    def feed(self, rank: int, ended: CopyEnded) -> CopyResult | None:
        """One rank is done; the result once all are. Raises ValueError where a rank reports what it cannot."""
        running = self._running.get(ended.number)
        if running is None or rank in running.ranks:
            raise ValueError(f"rank {rank} reports copy {ended.number}, which does not run there")
        running.ranks.add(rank)
        if ended.good < running.good or ended.why:
            running.failures.append((rank, ended.why))
        running.good = min(running.good, ended.good)
        if len(running.ranks) < self._world_size:
            return None
        del self._running[ended.number]
        off = False
        for failed, _ in running.failures:
            self._failed[failed, running.tier] += 1
            off |= self._failed[failed, running.tier] == FAILURES_UNTIL_OFF
        return CopyResult(ended.number, running.good, running.tier, tuple(running.failures), off)
