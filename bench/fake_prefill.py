"""A fake worker's queue of prompts: rank 0's own turns and shares, over a fixed number of tokens a step."""

from __future__ import annotations

from dataclasses import dataclass

from enginelink.turns import FairQueue
from worker.core.shares import Want, share_out


@dataclass(slots=True, eq=False)
class Prefill:
    """One prompt. `left`: its tokens that are not computed yet."""

    tenant: bytes
    left: int
    begun: bool = False


class PrefillQueue:
    def __init__(self, tokens_a_step: int) -> None:
        self._tokens_a_step = tokens_a_step
        self._waiting: FairQueue[Prefill] = FairQueue()
        self._running: list[Prefill] = []

    def add(self, prefill: Prefill) -> None:
        self._waiting.push(prefill.tenant, prefill, prefill.left)

    def drop(self, prefill: Prefill) -> None:
        """Nobody wants it any more."""
        if prefill.begun:
            if prefill in self._running:
                self._running.remove(prefill)
        else:
            self._waiting.drop(prefill.tenant, prefill)

    def step(self) -> None:
        """Compute a step's tokens."""
        wants = [Want(one.tenant, one.left) for one in self._running]
        counts, allowed = share_out(self._tokens_a_step, wants, self._waiting.costs())
        for one, count in zip(self._running, counts, strict=True):
            one.left -= count
        spent: set[bytes] = set()
        for tenant, one in self._waiting.order(spent):
            if not allowed[tenant]:
                spent.add(tenant)
                continue
            count = min(one.left, allowed[tenant])
            self._waiting.take(tenant, one)
            one.begun = True
            one.left -= count
            allowed[tenant] -= count
            self._running.append(one)
        self._running = [one for one in self._running if one.left]
