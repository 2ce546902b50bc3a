"""The other ranks of a simulated worker: they carry out every plan, each a while later, and must decide alike."""

from __future__ import annotations

from collections import deque

from worker.core.config import CacheConfig
from worker.core.plan import Plan, decode, encode
from worker.core.replica import Replica


class RanksDiffer(Exception):
    """Raised at the first plan in which a rank decided otherwise than rank 0."""

    def __init__(self, plan: int, rank: int) -> None:
        super().__init__(f"plan {plan}: rank {rank} decided otherwise than rank 0")
        self.plan = plan
        self.rank = rank


class Ranks:
    """Ranks 1 to `count`. Rank r lags by up to 3 r plans, now more and now less, as its reports do."""

    def __init__(self, config: CacheConfig, count: int) -> None:
        self._replicas = [Replica(config) for _ in range(count)]
        self._behind: list[deque[tuple[int, bytes, bytes]]] = [deque() for _ in range(count)]

    def send(self, plan: Plan, digest: bytes) -> None:
        """`digest`: rank 0's after the plan. Raises RanksDiffer."""
        if not self._replicas:
            return
        encoded = encode(plan)
        for rank, behind in enumerate(self._behind, 1):
            behind.append((plan.number, encoded, digest))
            self._catch_up(rank, plan.number * (rank + 6) % (3 * rank + 1))

    def end(self) -> None:
        """Whatever is still behind catches up. Raises RanksDiffer."""
        for rank in range(1, len(self._replicas) + 1):
            self._catch_up(rank, 0)

    def _catch_up(self, rank: int, lag: int) -> None:
        behind, replica = self._behind[rank - 1], self._replicas[rank - 1]
        while len(behind) > lag:
            number, encoded, digest = behind.popleft()
            replica.apply(decode(encoded))
            if replica.digest != digest:
                raise RanksDiffer(number, rank)
