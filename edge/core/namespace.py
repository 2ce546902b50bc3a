"""Ids as workers see them: keyed hashes, so that a caller can name only what is its own, whatever it writes."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from edge.core.types import ConversationKey, Principal

Isolation = Literal["tenant", "subject"]
"""Whose cached prefixes, or whose conversations, are one: a tenant's or a subject's."""
KEY_CHARS = 32
TAG_BYTES = 8


class Namespace:
    """Hashes under `id_key`, which edge replicas share: they agree without talking.

    `trust` says whose conversations a caller can name: whoever may write an id may speak as it. `isolation` says within
    what cached prefixes are shared.
    """

    def __init__(self, id_key: bytes, isolation: Isolation = "tenant", trust: Isolation = "subject") -> None:
        self._key = id_key
        self._isolation = isolation
        self._trust = trust

    def conversation(self, principal: Principal, caller_id: str) -> ConversationKey:
        owner = (principal.tenant,) if self._trust == "tenant" else (principal.tenant, principal.subject)
        return ConversationKey(self._hash(b"conversation", *owner, caller_id).hex()[:KEY_CHARS])

    def derived(self, principal: Principal, parent: str, content: bytes) -> ConversationKey:
        """For a caller that names no conversation: the same at every turn, from what does not change between turns."""
        digest = hashlib.sha256(content).hexdigest()
        return ConversationKey(
            self._hash(b"derived", principal.tenant, principal.subject, parent, digest).hex()[:KEY_CHARS]
        )

    def salt(self, principal: Principal, caller_salt: str = "") -> bytes:
        """Scope of the prefix cache; a caller's own salt only narrows it."""
        owner = (principal.tenant, principal.subject) if self._isolation == "subject" else (principal.tenant,)
        return self._hash(b"salt", *owner, caller_salt)[:16]

    def tenant_tag(self, tenant: str) -> bytes:
        """By which workers let tenants take turns, and know nothing else of them."""
        return self._hash(b"tenant", tenant)[:TAG_BYTES]

    def _hash(self, purpose: bytes, *parts: str) -> bytes:
        framed = [purpose]
        for part in parts:
            data = part.encode(errors="surrogatepass")
            framed += (len(data).to_bytes(4, "little"), data)
        return hmac.digest(self._key, b"".join(framed), "sha256")
