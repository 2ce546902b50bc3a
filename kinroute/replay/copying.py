"""When copies between the tiers of a simulated worker are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from worker.core.tiers import CopyWork, Tier


class Copying:
    """Each way between a tier and the one it copies to or from carries one copy after the other, in blocks a second.

    Ranks take different times for the same copy; it is over when the slowest has reported, which is what the rates
    say. So results do not depend on the number of ranks.
    """

    def __init__(self, host_rate: float, disk_rate: float) -> None:
        self._rates = {Tier.HOST: host_rate, Tier.DISK: disk_rate}
        self._running: dict[tuple[Tier, Tier], deque[tuple[float, int, int]]] = {}
        self._free_ms: dict[tuple[Tier, Tier], float] = {}

    def begin(self, now_ms: float, works: Iterable[CopyWork]) -> None:
        for work in works:
            way = (work.source, work.target)
            count = len(work.sources)
            ends_ms = max(now_ms, self._free_ms.get(way, 0.0)) + 1000.0 * count / self._rates[max(way)]
            self._free_ms[way] = ends_ms
            self._running.setdefault(way, deque()).append((ends_ms, work.number, count))

    @property
    def next_ms(self) -> float | None:
        """When the next one is over."""
        return min((running[0][0] for running in self._running.values() if running), default=None)

    def ended(self, now_ms: float) -> list[tuple[int, int]]:
        """Number and pages of those that are over by now, by number."""
        over: list[tuple[int, int]] = []
        for running in self._running.values():
            while running and running[0][0] <= now_ms:
                over.append(running.popleft()[1:])
        return sorted(over)
