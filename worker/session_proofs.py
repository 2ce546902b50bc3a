"""Proofs on the references that this fleet's context workers hand out, so that a generation worker dials nobody else.

A proof is an HMAC-SHA256, under a key of its own that is derived from an envelope key, over all that is read of a
reference, and until when it may be used. Whoever carries a reference, carries it unchanged.
"""

from __future__ import annotations

import dataclasses
import hmac

import msgspec

from enginelink.envelope import LEEWAY_S, Key, signing_key
from openengine.v1 import error_pb2
from worker.core.handoff import SessionRef
from worker.keys import WorkerKeys
from worker.refusal import Refused, invalid

GRACE_S = 60.0
"""Beside the time that pages wait: clocks of two workers differ, and a pull takes its time."""
_SUBKEY = b"kinroute kv session"


class SessionProofs:
    """`life_s`: how long a reference is good for. Without keys nothing is proven, and nothing asked for."""

    def __init__(self, keys: WorkerKeys, life_s: float) -> None:
        self._keys = keys
        self._life_s = life_s

    def proven(self, ref: SessionRef, now_s: float) -> SessionRef:
        """`ref` with a proof, where a key may sign."""
        key = signing_key(self._keys.current(), now_s)
        if key is None:
            return ref
        expires = str(int(now_s + self._life_s))
        return dataclasses.replace(ref, proof=f"{key.key_id}.{expires}.{_mac(key, expires, ref)}")

    def require(self, ref: SessionRef, now_s: float) -> None:
        """Before anything is dialled. Raises Refused: made by nobody with these keys, altered, or expired."""
        if not self._keys.is_configured:
            return
        *named, expires, mac = ["", "", *ref.proof.split(".")]
        key_id = ".".join(named[2:])
        keys = [one for one in self._keys.current() if one.key_id == key_id]
        usable = [one for one in keys if one.retire_at_s is None or now_s < one.retire_at_s]
        if not usable or not hmac.compare_digest(mac.encode(), _mac(usable[0], expires, ref).encode()):
            raise invalid("kv.session: it does not prove to come from a worker of this fleet, or was altered")
        if now_s >= int(expires) + LEEWAY_S:
            raise Refused(error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND, "kv.session: it has expired")


def _mac(key: Key, expires: str, ref: SessionRef) -> str:
    stated = msgspec.json.encode([expires, dataclasses.replace(ref, proof="")])
    return hmac.digest(hmac.digest(key.secret, _SUBKEY, "sha256"), stated, "sha256").hex()
