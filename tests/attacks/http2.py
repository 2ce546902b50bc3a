"""Just enough HTTP/2 to begin a gRPC call whose message is announced and never sent."""

from __future__ import annotations

import socket
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_HEADERS, END_STREAM = 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(pairs: Sequence[tuple[str, str]]) -> bytes:
    """Literals that nobody is to index, in HPACK; each at most 126 bytes."""
    coded = b""
    for name, value in pairs:
        assert max(len(name), len(value)) < 127
        coded += b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
    return coded


def announce(address: str, path: str, message_bytes: int, metadata: Sequence[tuple[str, str]]) -> set[int]:
    """Begin a call and say that a message of this length comes; the kinds of frames that end it or carry headers."""
    host, _, port = address.rpartition(":")
    pairs = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    start = b"\0" + message_bytes.to_bytes(4, "big") + b"x" * 1000
    with socket.create_connection((host, int(port)), timeout=20.0) as connection:
        connection.sendall(
            PREFACE
            + frame(SETTINGS, 0, 0, b"")
            + frame(HEADERS, END_HEADERS, 1, headers(pairs))
            + frame(DATA, 0, 1, start)
        )
        return _until_its_end(connection)


def _until_its_end(connection: socket.socket) -> set[int]:
    data, seen = b"", set[int]()
    while chunk := connection.recv(65_536):
        data += chunk
        while len(data) >= 9 and len(data) >= 9 + int.from_bytes(data[:3], "big"):
            length, kind, flags = int.from_bytes(data[:3], "big"), data[3], data[4]
            stream = int.from_bytes(data[5:9], "big")
            data = data[9 + length :]
            if stream == 1 or kind == GOAWAY:
                seen.add(kind)
            if kind in (RST_STREAM, GOAWAY) or (stream == 1 and flags & END_STREAM):
                return seen
    return seen
