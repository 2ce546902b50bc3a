"""Lets connections in, and no more than there is room for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from configuration.tls import Kept, ServerMaterial
from worker.memory.transfer import shared_memory
from worker.memory.transfer.connection import Connection, TlsConnection

PAUSE_S = 0.1

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Visitor:
    """`proven`: it has shown that it holds a secret."""

    connection: Connection
    proven: bool = False


class Door:
    """Runs `serve` for every connection in a task of its own, and closes the connection when that ends.

    Where `max_connections` are open, the oldest visitor that has proven nothing makes room; where all have, whoever
    comes is closed at once. On a Unix socket only processes of our own user get in; with `tls`, other sockets speak it,
    and the handshake is left to `serve`.
    """

    def __init__(
        self,
        serve: Callable[[Visitor], Awaitable[None]],
        max_connections: int,
        tls: Kept[ServerMaterial] | None = None,
    ) -> None:
        self._tls = tls
        self._serve = serve
        self._max_connections = max_connections
        self._visitors: dict[asyncio.Task[None], Visitor] = {}

    async def admit(self, listener: socket.socket) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a transfer connection could not be accepted", why=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            is_foreign = accepted.family == socket.AF_UNIX and not shared_memory.is_same_user(accepted)
            if is_foreign or not self._make_room():
                accepted.close()
                continue
            try:
                visitor = Visitor(self._connection(accepted))
            except OSError:
                # It has sent something and left before a handshake could begin.
                accepted.close()
                continue
            task = loop.create_task(self._visit(visitor))
            self._visitors[task] = visitor
            task.add_done_callback(self._forget)

    def _connection(self, accepted: socket.socket) -> Connection:
        if self._tls is None or accepted.family == socket.AF_UNIX:
            return Connection(accepted)
        return TlsConnection(accepted, self._tls.current.context)

    def _make_room(self) -> bool:
        if len(self._visitors) < self._max_connections:
            return True
        oldest = next((task for task, visitor in self._visitors.items() if not visitor.proven), None)
        if oldest is None:
            return False
        del self._visitors[oldest]
        oldest.cancel()
        return True

    async def _visit(self, visitor: Visitor) -> None:
        try:
            await self._serve(visitor)
        finally:
            visitor.connection.close()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._visitors.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a transfer connection failed", exc_info=error)
