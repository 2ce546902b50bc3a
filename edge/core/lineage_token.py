"""Lineage tokens: what a conversation shows to be believed as a child's parent, by any replica. Pure.

A JWT under `lineage_keys`, which only edges hold. It states who a conversation is; whoever sends it becomes that
conversation's child and never speaks as it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from edge.core.types import ConversationKey, FamilyKey, Lineage
from enginelink.compact_jwt import CompactSigner, CompactVerifier, JwtError, Key, signing_key

TYP = "kinroute-lineage+jwt"
MAX_TOKEN_BYTES = 2048
MAX_LIFE_S = 86_400
"""A signing key must outlive its last use by this."""
LEEWAY_S = 5


class LineageTokenError(Exception):
    """Raised when a lineage token may not be believed. `reason`: a few words of our own, for counters and the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Stated:
    """The conversation that a token was given to: the parent of whoever sends it."""

    family: FamilyKey
    conversation: ConversationKey
    depth: int


class TokenClaims(msgspec.Struct, frozen=True, rename={"issued_s": "iat", "expires_s": "exp"}):
    """Times are Unix seconds."""

    tenant: str
    family: str
    conversation: str
    depth: Annotated[int, msgspec.Meta(ge=0)]
    issued_s: int
    expires_s: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TokenClaims)


class LineageTokens:
    """Issues tokens with the newest of `keys` that may sign, believes those of any that is not retired."""

    def __init__(self, keys: Sequence[Key], life_s: int = MAX_LIFE_S) -> None:
        assert life_s <= MAX_LIFE_S, "a token would outlive its key"
        self._life_s = life_s
        self.use(keys)

    def use(self, keys: Sequence[Key]) -> None:
        """From now on instead of those before."""
        self._keys = keys
        self._signers = {key.key_id: CompactSigner(key, TYP) for key in keys}
        self._verifier = CompactVerifier(keys, TYP, MAX_TOKEN_BYTES)

    def issue(self, tenant: str, lineage: Lineage, now_s: float) -> str:
        """For the conversation to give to its children; `now_s`: Unix seconds.

        Empty where no key may sign, or the tenant's name leaves no room.
        """
        key = signing_key(self._keys, now_s)
        if key is None:
            return ""
        now = int(now_s)
        claims = TokenClaims(tenant, lineage.family, lineage.conversation, lineage.depth, now, now + self._life_s)
        token = self._signers[key.key_id].sign(_encoder.encode(claims))
        return token if len(token) <= MAX_TOKEN_BYTES else ""

    def verify(self, token: str, tenant: str, now_s: float) -> Stated:
        """Raises LineageTokenError."""
        try:
            claims = _decoder.decode(self._verifier.open(token, now_s)[0])
        except JwtError as error:
            raise LineageTokenError(str(error)) from error
        except msgspec.MsgspecError as error:
            raise LineageTokenError("unreadable claims") from error
        if claims.tenant != tenant:
            raise LineageTokenError("another tenant")
        if now_s < claims.issued_s - LEEWAY_S:
            raise LineageTokenError("not yet valid")
        if now_s >= claims.expires_s + LEEWAY_S:
            raise LineageTokenError("expired")
        if claims.expires_s - claims.issued_s > MAX_LIFE_S:
            raise LineageTokenError("a life too long")
        return Stated(FamilyKey(claims.family), ConversationKey(claims.conversation), claims.depth)
