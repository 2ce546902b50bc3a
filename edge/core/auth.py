"""Who calls: API keys by their hash, and JWTs under a shared secret. Pure; time is an argument."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import jwt

from edge.core.errors import Code, EdgeError
from edge.core.types import Principal

LEEWAY_S = 5
MAX_CREDENTIAL_BYTES = 8192
MAX_SEEN = 16_384
MIN_SECRET_BYTES = {"HS256": 32, "HS384": 48, "HS512": 64}
_FIND_BY_CHARS = 8


@dataclass(frozen=True, slots=True)
class JwtRules:
    """Tokens are believed only with one of `algorithms`, all of the HS family, and an expiry."""

    secret: bytes
    algorithms: tuple[str, ...] = ("HS256",)
    issuer: str | None = None
    audience: str | None = None
    tenant_claim: str = "tenant"

    def __post_init__(self) -> None:
        for algorithm in self.algorithms:
            if algorithm not in MIN_SECRET_BYTES:
                raise ValueError(f"{algorithm} is no algorithm of a shared secret: HS256, HS384 or HS512")
            if len(self.secret) < MIN_SECRET_BYTES[algorithm]:
                least = MIN_SECRET_BYTES[algorithm]
                raise ValueError(f"the JWT secret has {len(self.secret)} bytes: {algorithm} needs at least {least}")


@dataclass(slots=True)
class Authenticator:
    """`api_keys`: SHA-256 in lower-case hexadecimal to principal. `anonymous`: who calls without a credential.

    A token that was believed is remembered until it expires, at most 16,384 of them.
    """

    api_keys: dict[str, Principal]
    jwt_rules: JwtRules | None = None
    anonymous: Principal | None = None
    _seen: OrderedDict[str, tuple[Principal, float]] = field(default_factory=OrderedDict)
    _by_start: dict[str, list[tuple[str, Principal]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for digest, principal in self.api_keys.items():
            self._by_start.setdefault(digest[:_FIND_BY_CHARS], []).append((digest, principal))

    def authenticate(self, authorization: str | None, x_api_key: str | None, now_s: float) -> Principal:
        """`now_s`: Unix seconds. Raises EdgeError UNAUTHENTICATED, which says nothing of why."""
        credential = _credential(authorization, x_api_key)
        if credential is None:
            if self.anonymous is not None:
                return self.anonymous
            raise EdgeError(Code.UNAUTHENTICATED, "No API key: send one as Authorization: Bearer KEY.")
        principal = self._by_api_key(credential)
        if principal is None and self.jwt_rules is not None:
            principal = self._by_token(credential, self.jwt_rules, now_s)
        if principal is None:
            raise EdgeError(Code.UNAUTHENTICATED, "This API key is not known.")
        return principal

    def _by_api_key(self, api_key: str) -> Principal | None:
        """The start of the digest finds candidates; what it does not say is compared in constant time."""
        digest = hashlib.sha256(api_key.encode(errors="surrogatepass")).hexdigest()
        found = None
        for stored, principal in self._by_start.get(digest[:_FIND_BY_CHARS], ()):
            if hmac.compare_digest(stored, digest):
                found = principal
        return found

    def _by_token(self, token: str, rules: JwtRules, now_s: float) -> Principal | None:
        seen = self._seen.get(token)
        if seen is not None:
            known, end_s = seen
            if now_s < end_s:
                return known
            del self._seen[token]
            return None
        try:
            claims = jwt.decode(
                token,
                rules.secret,
                algorithms=list(rules.algorithms),
                issuer=rules.issuer,
                audience=rules.audience,
                options={
                    "require": ["exp", "sub"],
                    # Times are checked below, against the time that was given.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_aud": rules.audience is not None,
                },
            )
        except (jwt.InvalidTokenError, ValueError, RecursionError):
            return None
        end_s, start_s = claims["exp"], claims.get("nbf", 0)
        if not _is_time(end_s) or not _is_time(start_s) or not start_s - LEEWAY_S <= now_s < end_s + LEEWAY_S:
            return None
        principal = _principal(claims, rules)
        if principal is not None:
            self._seen[token] = (principal, end_s + LEEWAY_S)
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        return principal


def _credential(authorization: str | None, x_api_key: str | None) -> str | None:
    """The one credential that was sent. Raises EdgeError where it has a form that we do not take."""
    given = x_api_key or None
    if authorization:
        kind, _, rest = authorization.partition(" ")
        if kind.lower() != "bearer" or not rest.strip():
            raise EdgeError(Code.UNAUTHENTICATED, "Authorization must be Bearer KEY.")
        bearer = rest.strip()
        if given is not None and given != bearer:
            raise EdgeError(Code.UNAUTHENTICATED, "Authorization and x-api-key differ.")
        given = bearer
    if given is not None and len(given) > MAX_CREDENTIAL_BYTES:
        raise EdgeError(Code.UNAUTHENTICATED, "This API key is not known.")
    return given


def _principal(claims: dict[str, object], rules: JwtRules) -> Principal | None:
    tenant, subject = claims.get(rules.tenant_claim, "default"), claims["sub"]
    scope = claims.get("scope", "")
    scopes: Iterable[object] = scope.split() if isinstance(scope, str) else scope if isinstance(scope, list) else ()
    if not (isinstance(tenant, str) and tenant and isinstance(subject, str) and subject):
        return None
    return Principal(tenant, subject, frozenset(one for one in scopes if isinstance(one, str)), "jwt")


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
