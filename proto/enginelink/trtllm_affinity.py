"""TensorRT-LLM's signed hint of a request's parent, for engines and orchestrators that speak its dialect. Pure.

The parent stands in one header (over gRPC, one metadata key) and an HMAC-SHA256 of it with the request's own facts in
another. Over gRPC those are the request id and the conversation, over HTTP the role and the id of the disaggregated
request; the two are never worth anything for each other, since they sign different members.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

ID_KEY = "x-trtllm-subagent-affinity-id"
AUTH_KEY = "x-trtllm-subagent-affinity-auth"
CAPABILITY = "trtllm_supports_subagent_affinity"
"""In `ServerInfo.extra`: true where a hint is taken."""
CONTEXT_ONLY = "context_only"
MAX_ID_BYTES = 256
_AUTH_PREFIX = "sha256="

Role = Literal["CONTEXT", "GENERATION"]


class AffinityError(Exception):
    """Raised when a hint may not be believed, or cannot be made. `reason`: a slug for counters and the audit log."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GrpcHint:
    """What is signed over gRPC, always of a context-only request."""

    model: str
    conversation: str
    parent: str
    request_id: str

    def sign(self, key: bytes) -> str:
        """Raises AffinityError."""
        if not self.conversation.strip():
            raise AffinityError("no conversation", "extra.conversation_id is missing: a parent needs a child")
        if not self.parent or self.parent != self.parent.strip():
            raise AffinityError("untrimmed parent", f"{ID_KEY} is blank, or has blanks around it")
        members = {
            "purpose": ID_KEY,
            "model": self.model,
            "conversation_id": self.conversation,
            "subagent_affinity_id": self.parent,
            "request_type": CONTEXT_ONLY,
            "request_id": self.request_id,
        }
        return _sign(key, members, ascii_only=False)

    def metadata(self, key: bytes) -> tuple[tuple[str, str], tuple[str, str]]:
        """As gRPC sends it. Raises AffinityError, also for a parent that metadata cannot carry."""
        if not self.parent.isascii() or not self.parent.isprintable():
            raise AffinityError("unprintable parent", f"{ID_KEY} must be printable ASCII")
        return (ID_KEY, self.parent), (AUTH_KEY, self.sign(key))


@dataclass(frozen=True, slots=True)
class HttpHint:
    """What is signed over HTTP. `parent` counts without the blanks around it."""

    role: Role
    model: str
    conversation: str
    parent: str
    request_type: str | None = None
    disagg_request_id: int | None = None

    def sign(self, key: bytes) -> str:
        """Raises AffinityError."""
        parent = self.parent.strip()
        if not parent:
            raise AffinityError("blank parent", f"{ID_KEY} is blank")
        members = {
            "purpose": ID_KEY,
            "role": self.role,
            "model": self.model,
            "conversation_id": self.conversation,
            "subagent_affinity_id": parent,
            "request_type": self.request_type,
            "disagg_request_id": self.disagg_request_id,
        }
        return _sign(key, members, ascii_only=True)


@dataclass(frozen=True, slots=True)
class Presented:
    """A hint as it came in gRPC metadata, unproven."""

    parent: str
    auth: str

    @classmethod
    def read(cls, pairs: Iterable[tuple[str, str | bytes]]) -> Self | None:
        """None where there is no hint. Raises AffinityError: half of one, twice, or not what an id can be."""
        found: dict[str, str] = {}
        for name, value in pairs:
            if name not in (ID_KEY, AUTH_KEY):
                continue
            if name in found:
                raise AffinityError("repeated", f"{name} is given twice")
            found[name] = value if isinstance(value, str) else value.decode(errors="replace")
        if not found:
            return None
        if len(found) == 1:
            missing = AUTH_KEY if ID_KEY in found else ID_KEY
            raise AffinityError("incomplete", f"{missing} is missing: the two go together")
        if len(found[ID_KEY].encode()) > MAX_ID_BYTES:
            raise AffinityError("long parent", f"{ID_KEY} has more than {MAX_ID_BYTES} bytes")
        return cls(found[ID_KEY], found[AUTH_KEY])

    def verify(self, keys: Iterable[bytes], *, model: str, conversation: str, request_id: str) -> None:
        """Whether one of `keys` signed it for this very context request. Raises AffinityError."""
        verify(self.auth, keys, GrpcHint(model, conversation, self.parent, request_id))


def verify(auth: str, keys: Iterable[bytes], hint: GrpcHint | HttpHint) -> None:
    """Raises AffinityError where none of `keys` signed `hint` as `auth` says. Takes as long wherever they differ."""
    given = auth.encode(errors="replace")
    if not any(hmac.compare_digest(given, hint.sign(key).encode()) for key in keys):
        raise AffinityError("bad signature", f"{AUTH_KEY} does not sign this request")


def _sign(key: bytes, members: Mapping[str, object], *, ascii_only: bool) -> str:
    text = json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=ascii_only)
    return _AUTH_PREFIX + hmac.digest(key, text.encode(), hashlib.sha256).hex()
