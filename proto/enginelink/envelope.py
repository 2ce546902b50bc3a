"""The lineage envelope: a signed statement of an edge to one worker about one request. Pure.

An HS256 JWT (RFC 7515, RFC 7519) with a constant header per key. The edge signs; the worker that receives the request
checks every claim against it, once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

LIFE_S = 60
LEEWAY_S = 5
MAX_TOKEN_BYTES = 4096
PURPOSE_SUBMIT, PURPOSE_LINK, PURPOSE_RETURN = "submit", "link", "return"


class EnvelopeError(Exception):
    """Raised when an envelope may not be believed. The message is for the log, never for the caller."""


@dataclass(frozen=True, slots=True)
class Key:
    """`sign_from_s`, `retire_at_s`: Unix seconds; it is verified with between being read and being retired."""

    key_id: str
    secret: bytes
    sign_from_s: float = 0.0
    retire_at_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.secret) < 32:
            raise ValueError(f"envelope key {self.key_id} has {len(self.secret)} bytes: at least 32")


class Claims(msgspec.Struct, frozen=True, omit_defaults=True, rename={"issued_s": "iat", "expires_s": "exp"}):
    """What is stated. `aud` is the worker's instance id, `jti` is never used twice, `prompt_sha256` in hexadecimal is
    over the prompt's token ids as little-endian uint32. Times are Unix seconds."""

    purpose: str
    iss: str
    aud: str
    issued_s: int
    expires_s: int
    jti: str
    request_id: str = ""
    request_type: str = ""
    model: str = ""
    turn: str = ""
    tenant: str = ""
    family: str = ""
    conversation: str = ""
    parent: str = ""
    depth: int = 0
    final: bool = False
    prompt_sha256: str = ""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alg: str
    kid: str
    typ: str = ""


_claims_encoder = msgspec.json.Encoder()
_claims_decoder = msgspec.json.Decoder(Claims)
_header_decoder = msgspec.json.Decoder(_Header)


def prompt_sha256(token_ids: bytes) -> str:
    return hashlib.sha256(token_ids).hexdigest()


def signing_key(keys: Iterable[Key], now_s: float) -> Key | None:
    """The newest key that may sign now; None where there is none."""
    ready = [key for key in keys if key.sign_from_s <= now_s and (key.retire_at_s is None or now_s < key.retire_at_s)]
    return max(ready, key=lambda key: (key.sign_from_s, key.key_id), default=None)


class Signer:
    """Signs with one key; its header is encoded once."""

    def __init__(self, key: Key) -> None:
        header = msgspec.json.encode({"alg": "HS256", "kid": key.key_id, "typ": "JWT"})
        self._start = _encode(header) + b"."
        self._mac = hmac.new(key.secret, self._start, hashlib.sha256)

    def sign(self, claims: Claims) -> str:
        payload = _encode(_claims_encoder.encode(claims))
        mac = self._mac.copy()
        mac.update(payload)
        return (self._start + payload + b"." + _encode(mac.digest())).decode()


class Verifier:
    """Believes what one of `keys` signed for `audience`, within its life, once."""

    def __init__(self, keys: Iterable[Key], audience: str, guard: ReplayGuard) -> None:
        self._keys = {key.key_id: key for key in keys}
        self._audience = audience
        self._guard = guard

    def verify(self, token: str, now_s: float, **expected: object) -> Claims:
        """The claims, each of `expected` (by name) as it was given. Raises EnvelopeError."""
        if len(token) > MAX_TOKEN_BYTES or not token.isascii():
            raise EnvelopeError("longer than an envelope can be, or not ASCII")
        signed, dot, signature = token.encode().rpartition(b".")
        header, separator, payload = signed.partition(b".")
        if not dot or not separator:
            raise EnvelopeError("not three parts")
        key = self._key(header, now_s)
        if not hmac.compare_digest(_decode(signature), hmac.digest(key.secret, signed, "sha256")):
            raise EnvelopeError(f"not signed with key {key.key_id}")
        try:
            claims = _claims_decoder.decode(_decode(payload))
        except msgspec.MsgspecError as error:
            raise EnvelopeError(f"unreadable claims: {error}") from error
        self._check(claims, now_s, expected)
        if not self._guard.first(claims.jti, claims.expires_s + LEEWAY_S, now_s):
            raise EnvelopeError("seen before")
        return claims

    def _key(self, header: bytes, now_s: float) -> Key:
        try:
            fields = _header_decoder.decode(_decode(header))
        except msgspec.MsgspecError as error:
            raise EnvelopeError(f"unreadable header: {error}") from error
        if fields.alg != "HS256":
            raise EnvelopeError(f"algorithm {fields.alg!r}")
        key = self._keys.get(fields.kid)
        if key is None or (key.retire_at_s is not None and now_s >= key.retire_at_s):
            raise EnvelopeError("unknown or retired key")
        return key

    def _check(self, claims: Claims, now_s: float, expected: dict[str, object]) -> None:
        if claims.aud != self._audience:
            raise EnvelopeError("meant for another worker, or for this one before it started again")
        if not claims.issued_s - LEEWAY_S <= now_s < claims.expires_s + LEEWAY_S:
            raise EnvelopeError("outside its life")
        if claims.expires_s - claims.issued_s > LIFE_S:
            raise EnvelopeError(f"a life of more than {LIFE_S} s")
        if not claims.jti:
            raise EnvelopeError("no jti")
        for name, value in expected.items():
            if getattr(claims, name) != value:
                raise EnvelopeError(f"another {name} than the request's")


class ReplayGuard:
    """Remembers what was seen until it has expired, at most `capacity` of them."""

    def __init__(self, capacity: int = 1_048_576) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[str, float] = OrderedDict()

    def first(self, jti: str, until_s: float, now_s: float) -> bool:
        """Whether `jti` is new; it is remembered until `until_s`. Raises EnvelopeError when full."""
        while self._seen:
            oldest, end_s = next(iter(self._seen.items()))
            if end_s > now_s:
                break
            del self._seen[oldest]
        if jti in self._seen:
            return False
        if len(self._seen) >= self._capacity:
            raise EnvelopeError("too many envelopes are alive")
        self._seen[jti] = until_s
        return True


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _decode(data: bytes) -> bytes:
    """Only the one spelling that `_encode` gives: a second one would be a second token for one statement."""
    try:
        decoded = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise EnvelopeError("not base64url") from error
    if _encode(decoded) != data:
        raise EnvelopeError("not base64url")
    return decoded
