"""Ids as workers see them: keyed hashes, so that a caller can name only what is its own, whatever it writes."""

from __future__ import annotations

import functools
import hashlib
import hmac
from typing import Literal

from edge.core.types import ConversationKey, Principal

Isolation = Literal["tenant", "subject"]
"""Whose cached prefixes, or whose conversations, are one: a tenant's or a subject's."""
KEY_CHARS = 32
TAG_BYTES = 8
MAX_OWNERS = 4096
"""Whose prepared state is kept, by who was asked for last."""


class Namespace:
    """Hashes under `id_key`, which edge replicas share: they agree without talking.

    `trust` says whose conversations a caller can name: whoever may write an id may speak as it. `isolation` says within
    what cached prefixes are shared.
    """

    def __init__(self, id_key: bytes, isolation: Isolation = "tenant", trust: Isolation = "subject") -> None:
        self._key = id_key
        self._isolation = isolation
        self._trust = trust
        self._of = functools.lru_cache(MAX_OWNERS)(self._prepared)

    def conversation(self, principal: Principal, caller_id: str) -> ConversationKey:
        owner = (principal.tenant,) if self._trust == "tenant" else (principal.tenant, principal.subject)
        return ConversationKey(self._hash(b"conversation", owner, caller_id).hexdigest()[:KEY_CHARS])

    def derived(self, principal: Principal, parent: str, content: bytes) -> ConversationKey:
        """For a caller that names no conversation: the same at every turn, from what does not change between turns."""
        digest = hashlib.sha256(content).hexdigest()
        owner = (principal.tenant, principal.subject)
        return ConversationKey(self._hash(b"derived", owner, parent, digest).hexdigest()[:KEY_CHARS])

    def salt(self, principal: Principal, caller_salt: str = "") -> bytes:
        """Scope of the prefix cache; a caller's own salt only narrows it."""
        owner = (principal.tenant, principal.subject) if self._isolation == "subject" else (principal.tenant,)
        return self._hash(b"salt", owner, caller_salt).digest()[:16]

    def tenant_tag(self, tenant: str) -> bytes:
        """By which workers let tenants take turns, and know nothing else of them."""
        return self._hash(b"tenant", (tenant,)).digest()[:TAG_BYTES]

    def _hash(self, purpose: bytes, owner: tuple[str, ...], *parts: str) -> hmac.HMAC:
        mac = self._of(purpose, owner).copy()
        for part in parts:
            mac.update(_framed(part))
        return mac

    def _prepared(self, purpose: bytes, owner: tuple[str, ...]) -> hmac.HMAC:
        """The state after an owner's names, which all its ids have in common; copied, never changed."""
        return hmac.new(self._key, purpose + b"".join(map(_framed, owner)), hashlib.sha256)


def _framed(part: str) -> bytes:
    data = part.encode(errors="surrogatepass")
    return len(data).to_bytes(4, "little") + data
