"""Seals on handoff references that leave the edge: whose they are, which worker's, until when. Pure.

A seal is the member `kinroute_seal` of a reference's `attributes_struct`:

    key instance expires mac      the key's id, the worker's instance id, Unix seconds as a decimal string, hexadecimal
    encoding                      the worker's own bytes in base64, only where they are not the canonical ones

`mac` is an HMAC-SHA256 over all of that, the tenant, and everything else in the reference. The canonical bytes of a
reference are its deterministic serialization, so that a caller may decode and encode it on the way.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from edge.core.errors import Code, EdgeError
from enginelink.envelope import LEEWAY_S, Key, signing_key
from openengine.v1 import kv_pb2

MEMBER = "kinroute_seal"
LIFE_S = 120
PARAM = "kv.session"
_SUBKEY = b"kinroute handoff seal"
_DECIMAL = re.compile(r"[1-9][0-9]{0,11}")


@dataclass(frozen=True, slots=True)
class Opened:
    """`reference`: exactly as the worker `instance_id` encoded it."""

    reference: bytes
    instance_id: str


class Seals:
    """Seals with the newest of `keys` that may sign, and opens what any of them sealed for the same tenant."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.use(keys)

    def use(self, keys: Sequence[Key]) -> None:
        """Instead of the keys it had; they verify at once and sign from their time on."""
        self._keys = {key.key_id: key for key in keys}

    def seal(self, reference: bytes, *, tenant: str, instance_id: str, now_s: float) -> kv_pb2.KvSessionRef:
        """Raises EdgeError where no key may sign, or the worker's reference is none."""
        key = signing_key(self._keys.values(), now_s)
        if key is None:
            raise EdgeError(
                Code.NOT_IMPLEMENTED, "No reference leaves this edge: it has no key to seal it with.", reason="no key"
            )
        message = _read(reference)
        if message is None or MEMBER in message.attributes_struct.fields:
            raise EdgeError(Code.WORKER_FAILED, "A worker's reference cannot be sealed.", retryable=True)
        canonical = _canonical(message)
        encoding = "" if canonical == reference else base64.b64encode(reference).decode()
        expires = str(int(now_s) + LIFE_S)
        seal = struct_pb2.Struct()
        seal.update({"key": key.key_id, "instance": instance_id, "expires": expires})
        if encoding:
            seal.update({"encoding": encoding})
        seal.update({"mac": _mac(key, tenant, instance_id, expires, encoding, canonical)})
        message.attributes_struct.fields[MEMBER].struct_value.CopyFrom(seal)
        return message

    def open(self, sealed: kv_pb2.KvSessionRef, *, tenant: str, now_s: float) -> Opened:
        """Raises EdgeError INVALID: no seal, or not one that holds for this tenant now; it does not say which."""
        bare = kv_pb2.KvSessionRef()
        bare.CopyFrom(sealed)
        seal = _members(bare)
        key = self._keys.get(seal.get("key", ""))
        if key is None or (key.retire_at_s is not None and now_s >= key.retire_at_s):
            raise _refused("no seal, or of an unknown or retired key")
        del bare.attributes_struct.fields[MEMBER]
        canonical = _canonical(bare)
        expires, instance_id, encoding = seal.get("expires", ""), seal.get("instance", ""), seal.get("encoding", "")
        if not hmac.compare_digest(seal.get("mac", ""), _mac(key, tenant, instance_id, expires, encoding, canonical)):
            raise _refused("altered, or another tenant's")
        if not _DECIMAL.fullmatch(expires) or now_s >= int(expires) + LEEWAY_S:
            raise _refused("expired")
        return Opened(_decoded(encoding) if encoding else canonical, instance_id)


def _canonical(message: kv_pb2.KvSessionRef) -> bytes:
    """Of a message that is the caller's own: no attributes and an empty Struct become the same."""
    if not message.attributes_struct.fields:
        message.ClearField("attributes_struct")
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded


def _read(reference: bytes) -> kv_pb2.KvSessionRef | None:
    try:
        return kv_pb2.KvSessionRef.FromString(reference)
    except DecodeError:
        return None


def _members(message: kv_pb2.KvSessionRef) -> dict[str, str]:
    """The seal's members where each of them is a string; none otherwise."""
    if MEMBER not in message.attributes_struct.fields:
        return {}
    fields = message.attributes_struct.fields[MEMBER].struct_value.fields
    if any(value.WhichOneof("kind") != "string_value" or not value.string_value.isascii() for value in fields.values()):
        return {}
    return {name: value.string_value for name, value in fields.items()}


def _mac(key: Key, tenant: str, instance_id: str, expires: str, encoding: str, canonical: bytes) -> str:
    framed = []
    for part in (tenant.encode(), instance_id.encode(), expires.encode(), encoding.encode(), canonical):
        framed += [len(part).to_bytes(8, "little"), part]
    return hmac.digest(hmac.digest(key.secret, _SUBKEY, "sha256"), b"".join(framed), "sha256").hex()


def _decoded(encoding: str) -> bytes:
    try:
        return base64.b64decode(encoding, validate=True)
    except binascii.Error as error:
        raise _refused("unreadable encoding") from error


def _refused(reason: str) -> EdgeError:
    return EdgeError(
        Code.INVALID,
        "kv.session: it must be one that this service gave this tenant, unchanged, before it expired.",
        param=PARAM,
        reason=reason,
    )
