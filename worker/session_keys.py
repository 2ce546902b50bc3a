"""The ids and secrets of handoff sessions, which every rank of a group derives alike."""

from __future__ import annotations

import hashlib
import hmac

from worker.core.types import RequestKey

SESSION_ID_BYTES = 16


class SessionKeys:
    """A pseudorandom function of the request, under a key that never travels.

    So no rank has to be told a secret: both follow from the group's token and a nonce that is new at every start. A
    request's key is used once in the life of a group, so a session id never comes again.
    """

    def __init__(self, token: bytes, group_nonce: bytes) -> None:
        self._key = hmac.digest(token, b"handoff\0" + group_nonce, hashlib.sha256)

    def session_id(self, request: RequestKey) -> str:
        """32 hex digits."""
        return self._derive(b"session", request)[:SESSION_ID_BYTES].hex()

    def secret(self, request: RequestKey) -> str:
        """64 hex digits."""
        return self._derive(b"secret", request).hex()

    def _derive(self, what: bytes, request: RequestKey) -> bytes:
        return hmac.digest(self._key, what + b"\0" + request.to_bytes(8, "little"), hashlib.sha256)
