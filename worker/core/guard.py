"""The guard: where plain `lru` would have computed clearly less than the policy did, blocks are kept by `lru`.

Decided at the end of each window of requests, on differences request by request, so that what is hard for both counts
for neither. While fallen back, the policy's own ghost is asked whether it would do better by now; a policy that has
none, or none that does, is tried again after a while that doubles each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from worker.core.config import RetentionPolicy

WINDOW = 512
"""Requests; as many as a busy worker serves in some minutes."""
MARGIN = 0.01
"""Of the tokens that `lru` has to compute: the policy may cost that much more before the guard calls it worse."""
DEVIATIONS = 2.0
"""How many standard deviations of their sum the differences must be beyond that."""
FIRST_PROBATION = 4
LONGEST_PROBATION = 256
"""Windows after which a policy that was left is tried again."""


@dataclass(slots=True)
class Differences:
    """Of a window: by how many tokens one way of keeping blocks costs more than another, request by request."""

    total: int = 0
    squares: int = 0

    def add(self, more: int) -> None:
        self.total += more
        self.squares += more * more

    def exceed(self, margin: float) -> bool:
        """Their sum is above the margin, and not by chance."""
        return self.total > margin + DEVIATIONS * math.sqrt(self.squares)


@dataclass(slots=True)
class Guard:
    """Of the policy `configured`; `active` is the one in force."""

    configured: RetentionPolicy
    active: RetentionPolicy = field(init=False)
    switches: int = 0
    _requests: int = 0
    _lru: int = 0
    _real: Differences = field(default_factory=Differences)
    _ghost: Differences = field(default_factory=Differences)
    _probation: int = FIRST_PROBATION
    _windows: int = 0

    def __post_init__(self) -> None:
        self.active = self.configured

    def admitted(self, real: int, lru: int, ghost: int) -> RetentionPolicy | None:
        """One request had to compute so many tokens here, under `lru`, and under the policy's own ghost.

        Returns the policy that is in force from now on, None: the same as before.
        """
        self._requests += 1
        self._lru += lru
        self._real.add(real - lru)
        self._ghost.add(lru - ghost)
        if self._requests < WINDOW:
            return None
        falls_back, does_better = self._real.exceed(MARGIN * self._lru), self._ghost.exceed(0)
        self._requests = self._lru = 0
        self._real, self._ghost = Differences(), Differences()
        self._windows += 1
        if self.active is self.configured:
            return self._switch(RetentionPolicy.LRU) if falls_back and self.configured != RetentionPolicy.LRU else None
        if does_better or self._windows >= self._probation:
            self._probation = min(LONGEST_PROBATION, 2 * self._probation)
            return self._switch(self.configured)
        return None

    def _switch(self, policy: RetentionPolicy) -> RetentionPolicy:
        self.active = policy
        self.switches += 1
        self._windows = 0
        return policy
