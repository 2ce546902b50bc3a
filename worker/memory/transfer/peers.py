"""Connections to the ranks that pages are pulled from, kept for the next pull."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from configuration.tls import ClientMaterial, Kept
from worker.core.handoff import KvSource
from worker.memory.transfer import shared_memory, wire
from worker.memory.transfer.connection import Connection, TlsConnection
from worker.memory.transfer.wire import Greeting, Reply, Request, Status

CONNECT_S = 5.0
KEEP_S = 30.0
"""Less than a server's patience with idle connections, so that none is used as it is being closed."""


class PullFailed(Exception):
    """Raised when pages cannot be had; says why, in words for an operator."""


class MappedPool:
    """Another process's pool, to be read; unmapped when the last peer and the last pull have let go of it."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory


class Way(NamedTuple):
    """How to reach a rank: its TCP port, or the Unix socket beside that. `host` is an address, never a name."""

    host: str
    port: int
    is_local: bool


@dataclass(slots=True, eq=False)
class Peer:
    """One connection that was greeted. `pool`: the other end's memory, on a Unix socket."""

    connection: Connection
    greeting: Greeting
    pool: MappedPool | None = None
    num_requests: int = 0
    farewell: asyncio.TimerHandle | None = None

    async def ask(self, request: Request, secret: bytes) -> Reply:
        """Raises PullFailed where the answer is not OK."""
        await self._send(request, secret)
        return _accepted(await self.connection.receive(wire.REPLY_BYTES))

    async def ask_for_pool(self, request: Request, secret: bytes) -> MappedPool:
        await self._send(request, secret)
        data, descriptors = await self.connection.receive_descriptor(wire.REPLY_BYTES)
        if len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            _accepted(data)
            raise PullFailed("no descriptor came with the source's answer")
        return MappedPool(shared_memory.map_read_only(descriptors[0], _accepted(data).num_bytes))

    async def hear_verdict(self) -> None:
        """The reply that follows a pull's bytes."""
        _accepted(await self.connection.receive(wire.REPLY_BYTES))

    async def _send(self, request: Request, secret: bytes) -> None:
        number, self.num_requests = self.num_requests, self.num_requests + 1
        await self.connection.send(request.encode(secret, self.greeting.nonce, number))


def _accepted(data: bytes) -> Reply:
    reply = Reply.decode(data)
    match reply.status:
        case Status.OK:
            return reply
        case Status.REFUSED:
            raise PullFailed("the source refused: the session is unknown, over, or used already")
        case Status.MISMATCH:
            raise PullFailed("the source has pages of another shape, or not these blocks or heads")
        case Status.GONE:
            raise PullFailed("the session ended during the pull")


class Peers:
    """Used on one loop. With `tls`, all that is not on a Unix socket is spoken in it."""

    def __init__(self, tls: Kept[ClientMaterial] | None = None) -> None:
        self._tls = tls
        self._idle: dict[Way, list[Peer]] = {}
        self._pools: weakref.WeakValueDictionary[bytes, MappedPool] = weakref.WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def reach(self, way: Way) -> AsyncIterator[tuple[Peer, bool]]:
        """A peer for one user, and whether it is on a Unix socket: where there is none, TCP serves.

        It is kept for the next one if the block ends well, so it must be in a state to be asked again; else it is
        closed. Raises OSError, WireError.
        """
        try:
            peer = await self._take(way)
        except OSError:
            if not way.is_local:
                raise
            way = way._replace(is_local=False)
            peer = await self._take(way)
        try:
            yield peer, way.is_local
        except BaseException:
            peer.connection.close()
            raise
        self._keep(way, peer)

    def share(self, peer: Peer, pool: MappedPool) -> None:
        """Have later peers of the same server use the memory that was mapped for this one."""
        peer.pool = self._pools.setdefault(peer.greeting.server_id, pool)

    async def _take(self, way: Way) -> Peer:
        if idle := self._idle.get(way):
            peer = idle[-1]
            self._awaken(way, peer)
            return peer
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await _dial(way, None if self._tls is None else self._tls.current)
                try:
                    await connection.handshake()
                    greeting = Greeting.decode(await connection.receive(wire.GREETING_BYTES))
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s, or only one end speaks TLS") from error
        return Peer(connection, greeting, self._pools.get(greeting.server_id) if way.is_local else None)

    def _keep(self, way: Way, peer: Peer) -> None:
        self._idle.setdefault(way, []).append(peer)
        peer.connection.watch(lambda: self._drop(way, peer))
        peer.farewell = asyncio.get_running_loop().call_later(KEEP_S, self._drop, way, peer)

    def close(self) -> None:
        for way, idle in list(self._idle.items()):
            for peer in list(idle):
                self._drop(way, peer)

    def _drop(self, way: Way, peer: Peer) -> None:
        self._awaken(way, peer)
        peer.connection.close()

    def _awaken(self, way: Way, peer: Peer) -> None:
        peer.connection.unwatch()
        if peer.farewell is not None:
            peer.farewell.cancel()
        self._idle[way].remove(peer)
        if not self._idle[way]:
            del self._idle[way]


async def _dial(way: Way, tls: ClientMaterial | None) -> Connection:
    if way.is_local:
        name = shared_memory.socket_name(KvSource(way.host, way.port, 0, 0).address)
        connection = Connection(await _connect(socket.AF_UNIX, name))
        if not shared_memory.is_same_user(connection.socket):
            connection.close()
            raise ConnectionRefusedError("the socket for shared memory belongs to another user")
        return connection
    sock = await _connect(socket.AF_INET6 if ":" in way.host else socket.AF_INET, (way.host, way.port))
    if tls is None:
        return Connection(sock)
    return TlsConnection(sock, tls.context, server_name=tls.server_name or way.host)


async def _connect(family: socket.AddressFamily, address: tuple[str, int] | str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
