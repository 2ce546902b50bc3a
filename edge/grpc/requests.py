"""The requests of callers by their own ids, which count within a tenant alone."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.core.errors import Code, EdgeError

MAX_TENANTS = 1_024
MAX_ENDED = 256
"""Ids of one tenant that are remembered after their end."""


class Found(enum.Enum):
    RUNNING = enum.auto()
    ENDED = enum.auto()
    UNKNOWN = enum.auto()


class Requests:
    """Those that run, and for a while those that ended."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Callable[[], None]] = {}
        self._ended: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def held(self, tenant: str, request_id: str, abort: Callable[[], None]) -> Iterator[None]:
        """While it runs. Raises EdgeError DUPLICATE where the tenant has such a request running."""
        key = (tenant, request_id)
        if key in self._running:
            raise EdgeError(Code.DUPLICATE, f"request_id {request_id!r} is active")
        self._running[key] = abort
        try:
            yield
        finally:
            del self._running[key]
            self._remember(tenant, request_id)

    def abort(self, tenant: str, request_id: str) -> Found:
        """End it; what was found under that id."""
        abort = self._running.get((tenant, request_id))
        if abort is not None:
            abort()
            return Found.RUNNING
        return Found.ENDED if request_id in self._ended.get(tenant, ()) else Found.UNKNOWN

    def _remember(self, tenant: str, request_id: str) -> None:
        ended = self._ended.setdefault(tenant, OrderedDict())
        self._ended.move_to_end(tenant)
        ended[request_id] = None
        ended.move_to_end(request_id)
        if len(ended) > MAX_ENDED:
            ended.popitem(last=False)
        if len(self._ended) > MAX_TENANTS:
            self._ended.popitem(last=False)
