"""The transfer protocol's messages. All of them have a fixed size, so there is nothing to parse and nothing to grow.

    server: greeting
    client: request, proof        server: reply, and behind an OK
      PULL over TCP                 the pages' bytes, then a second reply: whether they were pinned all the while
      PULL on a Unix socket         the numbers of the pages, int32
      MAP on a Unix socket          a read-only descriptor of the pool, whose size the reply tells
      CONFIRM, RELEASE              nothing
    client: request …

A proof is HMAC-SHA256 under the session's secret over the greeting's nonce, the number of the request on its connection
and the request: whoever sees it can do nothing with it. Integers are little-endian; pages are sent as they lie in
memory.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
import sys
from dataclasses import dataclass
from typing import Self

from worker.core.handoff import KvShape

MAGIC = b"KINRKV\x00\x01"
ID_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
_GREETING = struct.Struct(f"<8s{ID_BYTES}s{NONCE_BYTES}s")
_REQUEST = struct.Struct(f"<B3xIIHH{ID_BYTES}s{ID_BYTES}s{ID_BYTES}s")
_REPLY = struct.Struct("<B7xQ")
GREETING_BYTES = _GREETING.size
REQUEST_BYTES = _REQUEST.size + PROOF_BYTES
REPLY_BYTES = _REPLY.size


class WireError(Exception):
    """Raised when the other end does not speak this protocol."""


class Kind(enum.IntEnum):
    PULL = 1
    CONFIRM = 2
    RELEASE = 3
    MAP = 4


class Status(enum.IntEnum):
    """REFUSED does not say why: no such session, a wrong secret, or used already. MISMATCH: another shape, or
    blocks or heads that the session lacks. GONE: the session ended while its bytes were sent."""

    OK = 1
    REFUSED = 2
    MISMATCH = 3
    GONE = 4


@dataclass(frozen=True, slots=True)
class Greeting:
    """`server_id`: new for each pool that is served."""

    server_id: bytes
    nonce: bytes

    def encode(self) -> bytes:
        return _GREETING.pack(MAGIC, self.server_id, self.nonce)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises WireError."""
        magic, server_id, nonce = _GREETING.unpack(data)
        if magic != MAGIC:
            raise WireError("it is no transfer port of this version")
        return cls(server_id, nonce)


@dataclass(frozen=True, slots=True)
class Request:
    """`puller`: which pulling rank asks, an id of its own. Blocks [first_block, first_block + num_blocks) and KV heads
    [head_start, head_stop), counted over the whole model, matter to PULL alone."""

    kind: Kind
    session_id: bytes
    puller: bytes
    shape: bytes
    first_block: int = 0
    num_blocks: int = 0
    head_start: int = 0
    head_stop: int = 0

    def encode(self, secret: bytes, nonce: bytes, number: int) -> bytes:
        """With its proof, as request `number` of a connection that was greeted with `nonce`."""
        body = _REQUEST.pack(
            self.kind,
            self.first_block,
            self.num_blocks,
            self.head_start,
            self.head_stop,
            self.session_id,
            self.puller,
            self.shape,
        )
        return body + prove(secret, nonce, number, body)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Of one whole request, whose proof is still to be checked. Raises WireError."""
        kind, first_block, num_blocks, head_start, head_stop, session_id, puller, shape = _REQUEST.unpack_from(data)
        try:
            return cls(Kind(kind), session_id, puller, shape, first_block, num_blocks, head_start, head_stop)
        except ValueError as error:
            raise WireError(f"a request of kind {kind}") from error


def prove(secret: bytes, nonce: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(secret, nonce + number.to_bytes(8, "little") + body, hashlib.sha256)


def proves(secret: bytes, nonce: bytes, number: int, data: bytes) -> bool:
    """Whether `data`, a whole request, was made with `secret`. Takes as long whatever is wrong."""
    body, proof = data[: _REQUEST.size], data[_REQUEST.size :]
    return hmac.compare_digest(proof, prove(secret, nonce, number, body))


@dataclass(frozen=True, slots=True)
class Reply:
    """`num_bytes`: of what follows an OK; of the pool, where that is a descriptor."""

    status: Status
    num_bytes: int = 0

    def encode(self) -> bytes:
        return _REPLY.pack(self.status, self.num_bytes)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises WireError."""
        status, num_bytes = _REPLY.unpack(data)
        try:
            return cls(Status(status), num_bytes)
        except ValueError as error:
            raise WireError(f"a reply of status {status}") from error


def shape_id(shape: KvShape) -> bytes:
    """Equal for pages that mean the same on both sides, byte order included."""
    members = (*(getattr(shape, name) for name in KvShape.__slots__), sys.byteorder)
    return hashlib.sha256(repr(members).encode()).digest()[:ID_BYTES]
