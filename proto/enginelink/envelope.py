"""The lineage envelope: a signed statement of an edge to one worker about one request. Pure.

A JWT (`compact_jwt`). The edge signs; the worker that receives the request checks every claim against it, once.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from enginelink.compact_jwt import CompactSigner, CompactVerifier, JwtError
from enginelink.compact_jwt import Key as Key
from enginelink.compact_jwt import signing_key as signing_key

TYP = "JWT"
LIFE_S = 60
LEEWAY_S = 5
MAX_TOKEN_BYTES = 4096
CAPABILITY = "kinroute_lineage"
"""In `ServerInfo.extra`: true where envelopes are taken."""
PURPOSE_SUBMIT, PURPOSE_LINK, PURPOSE_RETURN = "submit", "link", "return"


class EnvelopeError(Exception):
    """Raised when an envelope may not be believed. The message is for the log, never for the caller."""


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


_claims_encoder = msgspec.json.Encoder()
_claims_decoder = msgspec.json.Decoder(Claims)


def prompt_sha256(token_ids: bytes) -> str:
    return hashlib.sha256(token_ids).hexdigest()


class Signer:
    """Signs with one key; its header is encoded once."""

    def __init__(self, key: Key) -> None:
        self._signer = CompactSigner(key, TYP)

    def sign(self, claims: Claims) -> str:
        return self._signer.sign(_claims_encoder.encode(claims))


class Verifier:
    """Believes what one of `keys` signed for `audience`, within its life, once."""

    def __init__(self, keys: Iterable[Key], audience: str, guard: ReplayGuard) -> None:
        self._jwts = CompactVerifier(keys, TYP, MAX_TOKEN_BYTES)
        self._audience = audience
        self._guard = guard

    def verify(self, token: str, now_s: float, **expected: object) -> Claims:
        """The claims, each of `expected` (by name) as it was given. Raises EnvelopeError."""
        try:
            claims = _claims_decoder.decode(self._jwts.open(token, now_s)[0])
        except JwtError as error:
            raise EnvelopeError(str(error)) from error
        except msgspec.MsgspecError as error:
            raise EnvelopeError(f"unreadable claims: {error}") from error
        self._check(claims, now_s, expected)
        if not self._guard.first(claims.jti, claims.expires_s + LEEWAY_S, now_s):
            raise EnvelopeError("seen before")
        return claims

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
