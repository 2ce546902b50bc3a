"""A stream socket on the running loop, with or without TLS, that reads straight into memory of the caller's."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
from collections import deque
from collections.abc import Callable

MAX_PIECES = 64
"""Given to the system at once: else each scattered page costs a call, and often a wait."""
FAIR_BYTES = 16 << 20
"""How much one connection moves before others get a turn."""
WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """Reads and writes try the system first and wait only where it has nothing: a future for each is what makes
    asyncio's own socket calls slow. Its owner bounds every wait, and awaits one read or write at a time.

    A read or write that is cancelled touches no memory after that. Raises OSError where the other end is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._loop = asyncio.get_running_loop()
        self._moved = 0

    async def handshake(self) -> None:
        """Nothing, without TLS."""

    async def send(self, *pieces: bytes | memoryview) -> None:
        left = deque(memoryview(piece) for piece in pieces)
        while left:
            try:
                sent = self._send_some(left)
            except WAITS as wait:
                await self._until_possible(wait, sending=True)
                continue
            await self._moved_bytes(left, sent)

    async def receive_into(self, *pieces: memoryview) -> None:
        """Fill all of them, in order."""
        left = deque(piece for piece in pieces if piece)
        while left:
            try:
                received = self._receive_some(left)
            except WAITS as wait:
                await self._until_possible(wait)
                continue
            if not received:
                raise ConnectionResetError("the other end closed the connection")
            await self._moved_bytes(left, received)

    async def receive(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        await self.receive_into(memoryview(data))
        return bytes(data)

    async def receive_descriptor(self, num_bytes: int) -> tuple[bytes, list[int]]:
        """Like `receive`, with the descriptors that came along with the first byte: the caller's to close."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, num_bytes, 1, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                await self._readable()
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        return data + await self.receive(num_bytes - len(data)), descriptors

    def require_silence(self) -> None:
        """While nothing is due from the other end. Raises OSError where it has closed, or sent something."""
        try:
            early = self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        raise ConnectionResetError(
            "the other end spoke out of turn" if early else "the other end closed the connection"
        )

    def watch(self, on_input: Callable[[], None]) -> None:
        """While nobody reads: call it when the other end closes, or sends what nobody asked for."""
        self._loop.add_reader(self.socket.fileno(), on_input)

    def unwatch(self) -> None:
        self._loop.remove_reader(self.socket.fileno())

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self._loop.remove_reader(self.socket.fileno())
            self._loop.remove_writer(self.socket.fileno())
            self.socket.close()

    def _send_some(self, left: deque[memoryview]) -> int:
        return self.socket.sendmsg(itertools.islice(left, MAX_PIECES))

    def _receive_some(self, left: deque[memoryview]) -> int:
        return self.socket.recvmsg_into(itertools.islice(left, MAX_PIECES))[0]

    async def _until_possible(self, wait: Exception, *, sending: bool = False) -> None:
        """Until what raised `wait` may be tried again."""
        if isinstance(wait, ssl.SSLWantWriteError) or (sending and isinstance(wait, BlockingIOError)):
            await self._writable()
        else:
            await self._readable()

    async def _moved_bytes(self, left: deque[memoryview], count: int) -> None:
        """Drop the first `count` bytes of what is `left` to move."""
        self._moved += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
        if self._moved >= FAIR_BYTES:
            self._moved = 0
            await asyncio.sleep(0)

    async def _readable(self) -> None:
        future = self._loop.create_future()
        self._loop.add_reader(self.socket.fileno(), _settle, future)
        try:
            await future
        finally:
            self._loop.remove_reader(self.socket.fileno())

    async def _writable(self) -> None:
        future = self._loop.create_future()
        self._loop.add_writer(self.socket.fileno(), _settle, future)
        try:
            await future
        finally:
            self._loop.remove_writer(self.socket.fileno())


class TlsConnection(Connection):
    """`handshake` comes before all else."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """`server_name`: to be found in the other end's certificate, a name or an address; None: we are the server.

        Raises OSError where the other end is gone already.
        """
        super().__init__(sock)
        self._tls = self.socket = context.wrap_socket(
            sock, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
        )

    async def handshake(self) -> None:
        """Raises OSError where the other end speaks no TLS, or shows no certificate that is to be believed."""
        while True:
            try:
                self._tls.do_handshake()
            except WAITS as wait:
                await self._until_possible(wait)
            else:
                return

    def _send_some(self, left: deque[memoryview]) -> int:
        return self._tls.send(left[0])

    def _receive_some(self, left: deque[memoryview]) -> int:
        return self._tls.recv_into(left[0])


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
