"""Whether all ranks decided alike, plan by plan. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Differs:
    """Rank `rank` decided otherwise than rank 0 in plan `number`."""

    rank: int
    number: int


@dataclass(slots=True)
class Agreement:
    """Collects each rank's digest of each plan; every rank reports every plan, in order.

    `agreed` is the last plan of which all ranks reported the same digest.
    """

    world_size: int
    agreed: int = -1
    _waiting: list[deque[tuple[int, bytes]]] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = [deque() for _ in range(self.world_size)]

    def feed(self, rank: int, number: int, digest: bytes) -> Differs | None:
        """One report. Raises ValueError where a rank skips a plan or repeats one."""
        self._waiting[rank].append((number, digest))
        while all(self._waiting):
            expected, wanted = self._waiting[0][0]
            for other, waiting in enumerate(self._waiting):
                if waiting[0][0] != expected:
                    raise ValueError(f"rank {other} reports plan {waiting[0][0]} where rank 0 reports plan {expected}")
                if waiting[0][1] != wanted:
                    return Differs(other, expected)
            for waiting in self._waiting:
                waiting.popleft()
            self.agreed = expected
        return None

    def behind(self, rank: int) -> bool:
        """Whether rank 0 is ahead of `rank`."""
        return len(self._waiting[0]) > len(self._waiting[rank])
