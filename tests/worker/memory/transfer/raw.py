"""Both ends of the protocol by hand, byte by byte, to behave as neither of ours would."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.worker.memory.transfer.samples import SECRET, SESSION_ID, WAIT_S
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.memory.transfer import shared_memory, wire
from worker.memory.transfer.layouts import shape_of
from worker.memory.transfer.wire import Greeting, Kind, Request, Status

PULLER = b"p" * 16


def make_request(layout: KvLayout, kind: Kind = Kind.PULL, **changes: object) -> Request:
    members = {
        "session_id": bytes.fromhex(SESSION_ID),
        "puller": PULLER,
        "shape": wire.shape_id(shape_of(layout)),
        "first_block": 0,
        "num_blocks": 1,
        "head_start": layout.head_start,
        "head_stop": layout.head_stop,
    }
    return Request(kind, **(members | changes))  # type: ignore[arg-type]


class RawClient:
    """A connection that has read the greeting, and asks."""

    def __init__(self, address: str, *, local: bool = False) -> None:
        if local:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(shared_memory.socket_name(address))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self.socket.settimeout(WAIT_S)
        self.greeting = Greeting.decode(self.read(wire.GREETING_BYTES))
        self._number = 0

    def encode(self, request: Request, secret: str = SECRET) -> bytes:
        self._number += 1
        return request.encode(bytes.fromhex(secret), self.greeting.nonce, self._number - 1)

    def ask(self, request: Request, secret: str = SECRET) -> wire.Reply:
        self.socket.sendall(self.encode(request, secret))
        return wire.Reply.decode(self.read(wire.REPLY_BYTES))

    def read(self, num_bytes: int) -> bytes:
        """Less where the other end closed."""
        data = b""
        while len(data) < num_bytes and (part := self.socket.recv(num_bytes - len(data))):
            data += part
        return data

    def rest(self) -> bytes:
        """All until the other end closes."""
        data = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while part := self.socket.recv(1 << 20):
                data += part
        return bytes(data)

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that greets one connection, reads one request, and leaves the rest to `serve`."""

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        host, port = listener.getsockname()
        with _serving(listener, serve):
            yield f"{host}:{port}"


@contextlib.contextmanager
def raw_local_server(pool: DevicePool, serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The same on a Unix socket, beside the TCP address that it yields: shows `pool`, reads a second request, and
    leaves the rest to `serve`."""

    def show(connection: socket.socket) -> None:
        assert pool.fd is not None
        socket.send_fds(connection, [ok(pool.nbytes)], [pool.fd])
        read_request(connection)
        serve(connection)

    address = "127.0.0.1:1"
    with shared_memory.listen(address, 1) as listener, _serving(listener, show):
        listener.settimeout(WAIT_S)
        yield address


@contextlib.contextmanager
def _serving(listener: socket.socket, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            connection.sendall(Greeting(b"s" * 16, b"n" * 32).encode())
            read_request(connection)
            serve(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(WAIT_S)
    assert not thread.is_alive(), "the server still waits"


def read_request(connection: socket.socket) -> None:
    request = b""
    while len(request) < wire.REQUEST_BYTES:
        part = connection.recv(wire.REQUEST_BYTES - len(request))
        assert part, "no request came"
        request += part


def ok(num_bytes: int = 0) -> bytes:
    return wire.Reply(Status.OK, num_bytes).encode()
