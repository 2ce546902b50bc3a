"""The questions that an operator may ask of what rank 0 holds."""

from __future__ import annotations

from typing import Any, Protocol

from worker.core.replica import Replica


class Inspection(Protocol):
    """Each answers as JSON, on the engine thread, between steps, and changes nothing."""

    def families(self, replica: Replica, *, family: str | None, limit: int) -> list[dict[str, Any]]:
        """Up to `limit` conversations: all, or `family` and its descendants."""
        ...

    def dry_run(self, replica: Replica, parent: str) -> dict[str, Any]:
        """What a return of `parent` would demote now, what stays, and why."""
        ...

    def block(self, replica: Replica, key: bytes) -> dict[str, Any]:
        """Where the block with this key is, or why it is gone."""
        ...
