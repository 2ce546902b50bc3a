"""Which tokens are believed, and what of them. Pure; time is an argument.

A token's header chooses among our own keys, by `kid`, and its algorithm among the configured ones; nothing else of it
is read. `jku`, `x5u`, `x5c` and `jwk` lead nowhere; `crit` refuses the token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jwt

from edge.core.claims import ClaimError, ClaimRules
from edge.core.jwt_keys import ALGORITHMS, MAX_KID_CHARS, KeySet
from edge.core.types import Principal

LEEWAY_S = 5
UNKNOWN_KEY_ID = "unknown key id"


class TokenRefused(Exception):
    """Raised when a token is not believed.

    `reason`: words of our own, for the audit log. `kid`: what it named, where no such key is known.
    """

    def __init__(self, reason: str, kid: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kid = kid


@dataclass(frozen=True, slots=True)
class Believed:
    """`end_s`: until when, the leeway included."""

    principal: Principal
    end_s: float


@dataclass(frozen=True, slots=True)
class JwtRules:
    """Tokens are believed only with one of `algorithms`, an expiry and a subject."""

    algorithms: tuple[str, ...]
    issuer: str | None = None
    audience: str | None = None
    claims: ClaimRules = field(default_factory=ClaimRules)

    def __post_init__(self) -> None:
        for algorithm in self.algorithms:
            if algorithm not in ALGORITHMS:
                raise ValueError(f"{algorithm!r} is none of {', '.join(ALGORITHMS)}")

    def believe(self, token: str, keys: KeySet, now_s: float) -> Believed:
        """Raises TokenRefused. `now_s`: Unix seconds."""
        kid, claims = self._signed(token, keys)
        end_s, start_s = claims.get("exp"), claims.get("nbf", 0)
        if not _is_time(end_s) or not _is_time(start_s):
            raise TokenRefused("claims")
        if now_s >= end_s + LEEWAY_S:
            raise TokenRefused("expired")
        if now_s < start_s - LEEWAY_S:
            raise TokenRefused("not yet valid")
        try:
            principal = self.claims.principal(claims, f"jwt:{kid}" if kid else "jwt")
        except ClaimError as error:
            raise TokenRefused("claims") from error
        return Believed(principal, end_s + LEEWAY_S)

    def _signed(self, token: str, keys: KeySet) -> tuple[str, Mapping[str, Any]]:
        """The name of the key that signed, and the claims, of our issuer and for us."""
        kid, algorithm = self._header(token)
        tried = False
        for key in keys.candidates(kid, algorithm):
            tried = True
            try:
                return key.kid, self._decoded(token, key.key, algorithm)
            except jwt.InvalidSignatureError:
                continue
            except jwt.InvalidIssuerError as error:
                raise TokenRefused("issuer") from error
            except jwt.InvalidAudienceError as error:
                raise TokenRefused("audience") from error
            except jwt.MissingRequiredClaimError as error:
                raise TokenRefused({"iss": "issuer", "aud": "audience"}.get(error.claim, "claims")) from error
            except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
                raise TokenRefused("malformed") from error
        if tried:
            raise TokenRefused("bad signature")
        if keys.names(kid):
            raise TokenRefused("algorithm")
        raise TokenRefused(UNKNOWN_KEY_ID, kid)

    def _header(self, token: str) -> tuple[str, str]:
        """Its `kid`, empty without one, and its algorithm, which is one of ours."""
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
            raise TokenRefused("malformed") from error
        algorithm, kid = header.get("alg"), header.get("kid", "")
        if not isinstance(algorithm, str) or algorithm not in self.algorithms:
            raise TokenRefused("algorithm")
        if "crit" in header or not isinstance(kid, str) or len(kid) > MAX_KID_CHARS:
            raise TokenRefused("malformed")
        return kid, algorithm

    def _decoded(self, token: str, key: Any, algorithm: str) -> Mapping[str, Any]:
        return jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            issuer=self.issuer,
            audience=self.audience,
            options={
                "require": ["exp"],
                # Times and subject are checked by our own rules, against the time that was given.
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
                "verify_sub": False,
                "verify_jti": False,
                "verify_aud": self.audience is not None,
            },
        )


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
