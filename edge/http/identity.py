"""Who calls, and whose conversation the request is: from headers and body to a principal and a believed lineage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge.core.auth import Authenticator
from edge.core.headers import HeaderFamilies, fold
from edge.core.lineage import Believed, believe
from edge.core.namespace import Namespace
from edge.core.types import Principal
from edge.http.asgi import Scope
from edge.http.fields import Fields, wrong_type


@dataclass(frozen=True, slots=True)
class Identified:
    """`headers`: folded, internal ones dropped."""

    principal: Principal
    headers: Mapping[str, str]


class Identities:
    """Authenticates requests and reads their lineage. Raises EdgeError; never says why a credential failed."""

    def __init__(self, authenticator: Authenticator, families: HeaderFamilies, namespace: Namespace) -> None:
        self._authenticator = authenticator
        self._families = families
        self._namespace = namespace

    def identify(self, scope: Scope) -> Identified:
        headers = fold((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        principal = self._authenticator.authenticate(
            headers.get("authorization"), headers.get("x-api-key"), time.time()
        )
        return Identified(principal, headers)

    def lineage(self, caller: Identified, body: Mapping[str, Any], content: Callable[[], bytes]) -> Believed:
        """`content`: what identifies a conversation that has no id; asked for only then."""
        fields = Fields(body)
        params = fields.members("conversation_params") or {}
        conversation = params.get("conversation_id")
        if conversation is not None and type(conversation) is not str:
            raise wrong_type("conversation_params.conversation_id", "a string", conversation)
        claim = self._families.read(
            caller.headers, body_conversation=conversation, cache_key=fields.text("prompt_cache_key")
        )
        derived_from = content() if claim.conversation is None else b""
        return believe(claim, caller.principal, self._namespace, derived_from)

    def cache_salt(self, caller: Identified, body: Mapping[str, Any]) -> bytes:
        """Within what the request's prefixes are shared; a caller's own `cache_salt` only narrows it."""
        return self._namespace.salt(caller.principal, Fields(body).text("cache_salt") or "")
