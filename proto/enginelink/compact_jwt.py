"""Our JWTs (RFC 7515, RFC 7519): HS256, compact, with a constant header per key and type. Pure.

One framing for the envelope and the lineage token. `typ` parts them: what was signed as one never passes for the other,
not even under the same key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class JwtError(Exception):
    """Raised when a token may not be believed. The message is one of a few phrases of our own: fit for a counter."""


@dataclass(frozen=True, slots=True)
class Key:
    """`sign_from_s`, `retire_at_s`: Unix seconds; it is verified with between being read and being retired."""

    key_id: str
    secret: bytes
    sign_from_s: float = 0.0
    retire_at_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.secret) < 32:
            raise ValueError(f"signing key {self.key_id} has {len(self.secret)} bytes: at least 32")

    def is_retired(self, now_s: float) -> bool:
        return self.retire_at_s is not None and now_s >= self.retire_at_s


def signing_key(keys: Iterable[Key], now_s: float) -> Key | None:
    """The newest key that may sign now; None where there is none."""
    ready = [key for key in keys if key.sign_from_s <= now_s and not key.is_retired(now_s)]
    return max(ready, key=lambda key: (key.sign_from_s, key.key_id), default=None)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alg: str
    kid: str
    typ: str


_header_decoder = msgspec.json.Decoder(_Header)


def _header(key: Key, typ: str) -> bytes:
    return encode(msgspec.json.encode({"alg": "HS256", "kid": key.key_id, "typ": typ}))


class CompactSigner:
    """Signs with one key; its header is encoded once."""

    def __init__(self, key: Key, typ: str) -> None:
        self._start = _header(key, typ) + b"."
        self._mac = hmac.new(key.secret, self._start, hashlib.sha256)

    def sign(self, claims: bytes) -> str:
        """`claims`: a JSON object."""
        payload = encode(claims)
        mac = self._mac.copy()
        mac.update(payload)
        return (self._start + payload + b"." + encode(mac.digest())).decode()


class CompactVerifier:
    """Opens what one of `keys` signed as `typ`, in at most `max_bytes`."""

    def __init__(self, keys: Iterable[Key], typ: str, max_bytes: int) -> None:
        self._keys = {key.key_id: key for key in keys}
        # As we write it, which need not be read; others may order it otherwise.
        self._by_header = {_header(key, typ): key for key in self._keys.values()}
        self._typ = typ
        self._max_bytes = max_bytes

    def open(self, token: str, now_s: float) -> tuple[bytes, Key]:
        """The claims as JSON, and the key that signed them. Raises JwtError."""
        if len(token) > self._max_bytes or not token.isascii():
            raise JwtError("too long or not ASCII")
        signed, dot, signature = token.encode().rpartition(b".")
        header, separator, payload = signed.partition(b".")
        if not dot or not separator:
            raise JwtError("not three parts")
        key = self._key(header, now_s)
        if not hmac.compare_digest(decode(signature), hmac.digest(key.secret, signed, "sha256")):
            raise JwtError("not signed with the key it names")
        return decode(payload), key

    def _key(self, header: bytes, now_s: float) -> Key:
        key = self._by_header.get(header) or self._named(header)
        if key is None or key.is_retired(now_s):
            raise JwtError("unknown or retired key")
        return key

    def _named(self, header: bytes) -> Key | None:
        try:
            fields = _header_decoder.decode(decode(header))
        except msgspec.MsgspecError as error:
            raise JwtError("unreadable header") from error
        if fields.alg != "HS256":
            raise JwtError("another algorithm")
        if fields.typ != self._typ:
            raise JwtError("another type")
        return self._keys.get(fields.kid)


def encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def decode(data: bytes) -> bytes:
    """Only the one spelling that `encode` gives: a second one would be a second token for one statement."""
    try:
        decoded = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise JwtError("not base64url") from error
    if encode(decoded) != data:
        raise JwtError("not base64url")
    return decoded
