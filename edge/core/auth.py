"""Who calls: API keys by their hash, and tokens by the keys of their issuer. Pure; time is an argument."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Mapping

from edge.core.errors import Code, EdgeError
from edge.core.jwt_keys import KeySet
from edge.core.jwt_rules import UNKNOWN_KEY_ID, JwtRules, TokenRefused
from edge.core.types import Principal

MAX_CREDENTIAL_BYTES = 8192
MAX_SEEN = 16_384
REFUSED = "No valid credential: send an API key or a token as Authorization: Bearer KEY."
_FIND_BY_CHARS = 8
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
"""Without padding, as RFC 7515 has it: a second spelling would be a second token for one statement."""


class UnknownKeyId(EdgeError):
    """Raised when a token names a key that is not known, or none; its issuer may have published it meanwhile."""

    def __init__(self, kid: str) -> None:
        super().__init__(Code.UNAUTHENTICATED, REFUSED, reason=UNKNOWN_KEY_ID)
        self.kid = kid


class Authenticator:
    """`api_keys`: SHA-256 in lower-case hexadecimal to principal; `ends_s`: when those end that do, in Unix seconds.
    `anonymous`: who calls without a credential.

    A token that was believed is remembered until it expires or the keys change, at most 16,384 of them.
    """

    def __init__(
        self,
        api_keys: Mapping[str, Principal],
        jwt_rules: JwtRules | None = None,
        token_keys: KeySet | None = None,
        *,
        anonymous: Principal | None = None,
        ends_s: Mapping[str, float] | None = None,
    ) -> None:
        self._jwt_rules = jwt_rules
        self._token_keys = token_keys or KeySet()
        self._anonymous = anonymous
        self._seen: OrderedDict[str, tuple[Principal, float]] = OrderedDict()
        self._by_start: dict[str, list[tuple[str, Principal]]] = {}
        self._ends_s: Mapping[str, float] = {}
        self.use(api_keys, ends_s)

    def use(self, api_keys: Mapping[str, Principal], ends_s: Mapping[str, float] | None = None) -> None:
        """From now on these API keys, and no others."""
        self._by_start = {}
        for digest, principal in api_keys.items():
            self._by_start.setdefault(digest[:_FIND_BY_CHARS], []).append((digest, principal))
        self._ends_s = ends_s or {}

    def use_token_keys(self, keys: KeySet) -> None:
        """From now on these keys of the issuer; tokens of others are forgotten."""
        if keys != self._token_keys:
            self._seen.clear()
        self._token_keys = keys

    def authenticate(self, authorization: str | None, x_api_key: str | None, now_s: float) -> Principal:
        """`now_s`: Unix seconds. Raises EdgeError UNAUTHENTICATED, which says nothing of why."""
        credential = _credential(authorization, x_api_key)
        if credential is None:
            if self._anonymous is None:
                raise _refused("no credential")
            return self._anonymous
        seen = self._seen.get(credential)
        if seen is not None and now_s < seen[1]:
            return seen[0]
        principal = self._by_api_key(credential, now_s)
        if principal is not None:
            return principal
        if self._jwt_rules is None or not _JWT.fullmatch(credential):
            raise _refused("malformed" if credential.count(".") == 2 else "unknown key")
        return self._by_token(credential, self._jwt_rules, now_s)

    def _by_api_key(self, api_key: str, now_s: float) -> Principal | None:
        """The start of the digest finds candidates; what it does not say is compared in constant time."""
        digest = hashlib.sha256(api_key.encode(errors="surrogatepass")).hexdigest()
        found = None
        for stored, principal in self._by_start.get(digest[:_FIND_BY_CHARS], ()):
            if hmac.compare_digest(stored, digest):
                found = principal
        if found is not None and now_s >= self._ends_s.get(digest, now_s + 1):
            raise _refused("expired")
        return found

    def _by_token(self, token: str, rules: JwtRules, now_s: float) -> Principal:
        self._seen.pop(token, None)
        try:
            believed = rules.believe(token, self._token_keys, now_s)
        except TokenRefused as refused:
            if refused.reason == UNKNOWN_KEY_ID:
                raise UnknownKeyId(refused.kid) from refused
            raise _refused(refused.reason) from refused
        self._seen[token] = (believed.principal, believed.end_s)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return believed.principal


def _credential(authorization: str | None, x_api_key: str | None) -> str | None:
    """The one credential that was sent. Raises EdgeError where it has a form that we do not take."""
    given = x_api_key or None
    if authorization:
        kind, _, rest = authorization.partition(" ")
        bearer = rest.strip()
        if kind.lower() != "bearer" or not bearer or (given is not None and given != bearer):
            raise _refused("malformed")
        given = bearer
    if given is not None and len(given) > MAX_CREDENTIAL_BYTES:
        raise _refused("malformed")
    return given


def _refused(reason: str) -> EdgeError:
    return EdgeError(Code.UNAUTHENTICATED, REFUSED, reason=reason)
