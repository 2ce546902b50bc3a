"""Pulls that every rank of the group takes part in, each for the heads it holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.types import RequestKey


@dataclass(slots=True)
class _Pull:
    ranks: set[int] = field(default_factory=set)
    why: str | None = None


class PullBoard:
    """Waits for the last rank even after one has failed: until then others may still write into the pages."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pulls: dict[RequestKey, _Pull] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def feed(self, rank: int, request: RequestKey, why: str | None) -> tuple[str | None] | None:
        """One rank is done. None until all are; then a tuple of why it failed, or of None where it did not."""
        pull = self._pulls.setdefault(request, _Pull())
        pull.ranks.add(rank)
        if why is not None and pull.why is None:
            pull.why = f"rank {rank}: {why}"
        if len(pull.ranks) < self._world_size:
            return None
        del self._pulls[request]
        return (pull.why,)
