"""What of a limit by the minute is used: a bucket that empties evenly, within a minute when it is full."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0
NOISE_S = 1e-6
"""Of adding up floats. Who waits as long as it was told must not come that much too early."""


@dataclass(slots=True)
class Meter:
    """One number however much was counted: `empty_s`, when nothing is used any more.

    So a whole minute's worth may be used at once, and as much again only as the minute passes. A limit of n makes each
    of what it counts worth a nth of a minute, whoever asks with whichever limit.
    """

    empty_s: float = float("-inf")

    def wait_s(self, amount: int, limit: int, now_s: float) -> float:
        """How long until `amount`, which `limit` holds, fits; 0 where it does. A minute where nothing ever does."""
        if limit <= 0:
            return MINUTE_S
        wait_s = self.reset_s(now_s) + MINUTE_S * amount / limit - MINUTE_S
        return wait_s if wait_s > NOISE_S else 0.0

    def add(self, amount: int, limit: int, now_s: float) -> None:
        """Count `amount`, whether or not it fits: what is over the limit makes the waiting longer."""
        self.empty_s = now_s + self.reset_s(now_s) + MINUTE_S * amount / max(1, limit)

    def left(self, limit: int, now_s: float) -> int:
        """How much fits now."""
        return max(0, int(limit * (1.0 - (self.reset_s(now_s) - NOISE_S) / MINUTE_S))) if self.is_used(now_s) else limit

    def reset_s(self, now_s: float) -> float:
        """How long until nothing is used."""
        return max(0.0, self.empty_s - now_s)

    def is_used(self, now_s: float) -> bool:
        return self.empty_s > now_s
