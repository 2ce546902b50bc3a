"""One end of the control channel between two ranks: authenticated, length-framed, over TCP.

Both ends prove that they hold the group's token without showing it; after that the channel is plain. A frame is a
little-endian uint32 length, one byte of `Kind`, and the payload.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import secrets
import socket
import struct
import threading

HEADER = struct.Struct("<IB")
MAX_FRAME_BYTES = 1 << 28
NONCE_BYTES = 32
KEEPALIVE_IDLE_S = 10


class Kind(enum.IntEnum):
    # Leader to follower.
    SETUP = 1
    PLAN = 2
    CHECK = 3
    EXPLAIN = 4
    STOP = 5
    # Follower to leader.
    FACTS = 16
    READY = 17
    REPORT = 18
    PULLED = 19
    CHECKED = 20
    EXPLAINED = 21
    FAILED = 22
    COPIED = 23


class ChannelError(Exception):
    """Raised when the other end is not of this group, or sends what no end of ours would."""


class Channel:
    """Frames to and from one other rank. `send` may be called from any thread, `receive` from one at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        self._socket = connection
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Returns once the system has it. Raises OSError where the other end is gone."""
        frame = HEADER.pack(len(payload), kind) + payload
        with self._send_lock:
            self._socket.sendall(frame)

    def receive(self) -> tuple[Kind, bytes] | None:
        """The next frame; None when the other end closed. Raises ChannelError, OSError."""
        header = self._exactly(HEADER.size)
        if header is None:
            return None
        length, kind = HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {length} bytes")
        payload = self._exactly(length)
        if payload is None:
            return None
        return Kind(kind), payload

    def set_deadline(self, seconds: float | None) -> None:
        """How long one `send` or `receive` may wait; TimeoutError after that."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Wakes a `receive` in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, length: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(length - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)


def admit(connection: socket.socket, token: bytes, group_nonce: bytes) -> tuple[int, Channel]:
    """The leader's side of the greeting: returns the follower's rank. Raises ChannelError, OSError."""
    own = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own)
    answer = _read(connection, NONCE_BYTES + 4 + 32)
    other, rank_bytes, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES : NONCE_BYTES + 4], answer[NONCE_BYTES + 4 :]
    if not hmac.compare_digest(proof, _proof(token, b"follower", own, other, rank_bytes)):
        raise ChannelError("a connection that does not know the group's token")
    connection.sendall(group_nonce + _proof(token, b"leader", other, own, group_nonce))
    return int.from_bytes(rank_bytes, "little"), Channel(connection)


def join(connection: socket.socket, token: bytes, rank: int) -> tuple[bytes, Channel]:
    """The follower's side; returns the group's nonce. Raises ChannelError, OSError."""
    other = _read(connection, NONCE_BYTES)
    own, rank_bytes = secrets.token_bytes(NONCE_BYTES), rank.to_bytes(4, "little")
    connection.sendall(own + rank_bytes + _proof(token, b"follower", other, own, rank_bytes))
    answer = _read(connection, NONCE_BYTES + 32)
    group_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"leader", own, other, group_nonce)):
        raise ChannelError("the leader does not know the group's token")
    return group_nonce, Channel(connection)


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"\0".join(parts), hashlib.sha256)


def _read(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            raise ChannelError("the other end closed during the greeting")
        parts += part
    return bytes(parts)
