"""References of handoffs as the very bytes that an engine sent, whatever its serialization looks like.

Protobuf's own objects do not promise to write what they have read.
"""

from __future__ import annotations

import math

from google.protobuf import struct_pb2

from openengine.v1 import kv_pb2

MAX_EXACT = 2**53
MAX_DEPTH = 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PREFILL_READY = 4
_READY_SESSION = 1
_KV = 8
_KV_SESSION = 1


def session_in(response: bytes) -> bytes | None:
    """The KvSessionRef in a GenerateResponse's PrefillReady; None where there is not exactly one."""
    ready = _only(response, _PREFILL_READY)
    return None if ready is None else _only(ready, _READY_SESSION)


def with_session(request: bytes, session: bytes) -> bytes:
    """A serialized GenerateRequest that has no `kv.session`, with this one: what is written later is merged."""
    return request + _framed(_KV, _framed(_KV_SESSION, session))


def cannot_be_replayed(session: kv_pb2.KvSessionRef) -> str | None:
    """Why not every client could carry this reference on unchanged; None where it can be."""
    if not session.session_id and "disagg_request_id" not in session.attributes_struct.fields:
        return "it has no id"
    for endpoint in session.endpoints:
        if not endpoint.host or not 1 <= endpoint.port <= 65535:
            return "an endpoint lacks its host or port"
    return _odd_number(struct_pb2.Value(struct_value=session.attributes_struct), MAX_DEPTH)


def _odd_number(value: struct_pb2.Value, depth: int) -> str | None:
    if depth == 0:
        return "it nests too deep"
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                return "a number is not finite"
            return "an integer is past 2^53" if abs(number) > MAX_EXACT and number.is_integer() else None
        case "struct_value":
            inner = list(value.struct_value.fields.values())
        case "list_value":
            inner = list(value.list_value.values)
        case _:
            return None
    return next((why for one in inner if (why := _odd_number(one, depth - 1)) is not None), None)


def _only(message: bytes, wanted: int) -> bytes | None:
    """The one length-delimited field `wanted`; None where there are more or none, or this is no message."""
    found: bytes | None = None
    at = 0
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            number, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                _, at = _varint(message, at)
            elif kind == _BYTES:
                length, at = _varint(message, at)
                if at + length > len(message) or (number == wanted and found is not None):
                    return None
                found = message[at : at + length] if number == wanted else found
                at += length
            elif kind in (_FIXED32, _FIXED64):
                at += 4 if kind == _FIXED32 else 8
            else:
                return None
    except IndexError:
        return None
    return found if at == len(message) else None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Its value, and where it ends. Raises IndexError."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80 or shift >= 70:
            return value, at


def _framed(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _encoded(len(content)) + content


def _encoded(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
