"""Serves one rank's pages to those who prove that they hold a session's secret."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from configuration.tls import Kept, ServerMaterial
from worker.core.handoff import KvSource
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.memory.transfer import shared_memory, wire
from worker.memory.transfer.connection import Connection
from worker.memory.transfer.door import Door, Visitor
from worker.memory.transfer.layouts import shape_of
from worker.memory.transfer.loop_thread import LoopThread
from worker.memory.transfer.pages import page_bytes_of
from worker.memory.transfer.sessions import Session, Sessions
from worker.memory.transfer.wire import Kind, Reply, Request, Status

BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`proof_s`: how long a new connection may take for its first whole request; `idle_s`: how long one that has proven
    a secret may take for the next; `answer_s`: how long one answer may take, a pull's bytes included."""

    max_connections: int = 256
    proof_s: float = 5.0
    idle_s: float = 60.0
    answer_s: float = 60.0


class TransferServer:
    """`pin` and `unpin` are for the engine thread; the rest happens on a thread of the server's own."""

    def __init__(
        self,
        pool: DevicePool,
        layout: KvLayout,
        listen_host: str,
        limits: ServerLimits | None = None,
        tls: Kept[ServerMaterial] | None = None,
    ) -> None:
        self._tls = tls
        self._pool = pool
        self._layout = layout
        self._listen_host = listen_host
        self._limits = limits or ServerLimits()
        self._pages = page_bytes_of(pool)
        self._shape = wire.shape_id(shape_of(layout))
        self._id = secrets.token_bytes(wire.ID_BYTES)
        self._sessions = Sessions()
        self._on_release: Callable[[str], None] | None = None
        self._listeners: list[socket.socket] = []
        self._admitting: list[asyncio.Task[None]] = []
        self.address = ""
        self.host_key = ""

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def on_release(self, callback: Callable[[str], None]) -> None:
        """On rank 0, to be told, on the server's thread, the id of each session whose pages nobody needs any more."""
        self._on_release = callback

    def start(self) -> None:
        """Listens when it returns; `address` and `host_key` say where. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._listen_host else socket.AF_INET
        listener = socket.create_server((self._listen_host, 0), family=family, backlog=BACKLOG)
        host, port = listener.getsockname()[:2]
        self.address = KvSource(host, port, 0, 0).address
        self._listeners.append(listener)
        if self._pool.fd is not None and (key := shared_memory.host_key()):
            # Where another process has taken that name, TCP is all there is.
            with contextlib.suppress(OSError):
                self._listeners.append(shared_memory.listen(self.address, BACKLOG))
                self.host_key = key
        self._thread = LoopThread("transfer-server", self._shut)
        self._thread.call(self._open)

    def close(self) -> None:
        """Whoever is pulling sees its pull fail."""
        self._thread.close()

    def pin(self, session_id: str, secret: str, pages: npt.NDArray[np.int32], num_tokens: int) -> None:
        """Serve `pages`, int32 [n], one for each block of `num_tokens` tokens, until `unpin`."""
        blocks = -(-num_tokens // self._layout.tokens_per_block)
        assert len(pages) == blocks, f"{len(pages)} pages for {blocks} blocks"
        self._sessions.add(session_id, secret, pages)

    def unpin(self, session_id: str) -> None:
        """The pages may change as soon as this returns: pulls that are not over fail. Unknown ids are ignored."""
        self._sessions.remove(session_id)

    # On the server's thread.

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        door = Door(self._serve, self._limits.max_connections, self._tls)
        for listener in self._listeners:
            listener.setblocking(False)
            self._admitting.append(loop.create_task(door.admit(listener)))

    def _shut(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _serve(self, visitor: Visitor) -> None:
        """One connection, until it breaks a rule or a deadline, or closes."""
        with contextlib.suppress(OSError, wire.WireError):
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            async with asyncio.timeout(self._limits.proof_s):
                await visitor.connection.handshake()
                await visitor.connection.send(wire.Greeting(self._id, nonce).encode())
            for number in itertools.count():
                async with asyncio.timeout(self._limits.idle_s if visitor.proven else self._limits.proof_s):
                    data = await visitor.connection.receive(wire.REQUEST_BYTES)
                async with asyncio.timeout(self._limits.answer_s):
                    if not await self._answer(visitor, data, nonce, number):
                        return

    async def _answer(self, visitor: Visitor, data: bytes, nonce: bytes, number: int) -> bool:
        """False: nothing more is heard on this connection."""
        connection, request = visitor.connection, Request.decode(data)
        session = self._sessions.prove(request, data, nonce, number)
        if session is None:
            return await _refuse(connection, Status.REFUSED)
        visitor.proven = True
        if request.shape != self._shape:
            return await _refuse(connection, Status.MISMATCH)
        is_local = connection.socket.family == socket.AF_UNIX
        match request.kind:
            case Kind.PULL:
                return await self._pull(connection, request, session, is_local=is_local)
            case Kind.CONFIRM if request.puller in session.pulls:
                # The session was found, so its pages were pinned until now.
                await connection.send(Reply(Status.OK).encode())
                return True
            case Kind.RELEASE if self._on_release is not None:
                self._on_release(request.session_id.hex())
                await connection.send(Reply(Status.OK).encode())
                return True
            case Kind.MAP if is_local and self._pool.fd is not None:
                self._share(connection, self._pool.fd)
                return True
        return await _refuse(connection, Status.REFUSED)

    def _share(self, connection: Connection, pool: int) -> None:
        descriptor = shared_memory.read_only(pool)
        try:
            socket.send_fds(connection.socket, [Reply(Status.OK, self._pool.nbytes).encode()], [descriptor])
        finally:
            os.close(descriptor)

    async def _pull(self, connection: Connection, request: Request, session: Session, *, is_local: bool) -> bool:
        layout = self._layout
        blocks = range(request.first_block, request.first_block + request.num_blocks)
        heads = (request.head_start - layout.head_start, request.head_stop - layout.head_start)
        if not blocks or blocks.stop > len(session.pages) or not 0 <= heads[0] < heads[1] <= layout.heads:
            return await _refuse(connection, Status.MISMATCH)
        if not self._sessions.take(session, request):
            return await _refuse(connection, Status.REFUSED)
        pages = session.pages[blocks.start : blocks.stop]
        if is_local:
            await connection.send(Reply(Status.OK, pages.nbytes).encode() + pages.tobytes())
            return True
        await connection.send(
            Reply(Status.OK, layout.page_bytes // layout.heads * (heads[1] - heads[0]) * len(pages)).encode()
        )
        for pieces in self._pages.read(pages, heads):
            if not self._sessions.stands(request.session_id, session):
                return False
            await connection.send(*pieces)
        # Every byte is read only now; a session that has ended may have had its pages changed before they were.
        stands = self._sessions.stands(request.session_id, session)
        await connection.send(Reply(Status.OK if stands else Status.GONE).encode())
        return stands


async def _refuse(connection: Connection, status: Status) -> bool:
    await connection.send(Reply(status).encode())
    return False
