"""Who calls, and whose conversation the request is: from headers or metadata to a principal and a believed lineage."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from edge.audit import Audit
from edge.core.auth import Authenticator, UnknownKeyId
from edge.core.errors import Code, EdgeError
from edge.core.headers import HeaderFamilies, fold, naming
from edge.core.lineage import Believed, Lineages
from edge.core.types import Principal, Scope


@dataclass(frozen=True, slots=True)
class Identified:
    """`headers`: folded, internal ones dropped. `tenant_tag`: the tenant as workers see it."""

    principal: Principal
    headers: Mapping[str, str]
    tenant_tag: bytes = b""


Seek = Callable[[str], Awaitable[bool]]
"""Looks for the key with this id at its issuer; False: nothing new was learned. May raise EdgeError."""


async def seek_nowhere(kid: str) -> bool:
    return False


NO_SCOPE = "no scope operator"


class Identities:
    """Authenticates requests and reads their lineage. Raises EdgeError; never says why a credential failed."""

    def __init__(
        self,
        authenticator: Authenticator,
        families: HeaderFamilies,
        lineages: Lineages,
        audit: Audit,
        *,
        seek: Seek = seek_nowhere,
    ) -> None:
        self._authenticator = authenticator
        self._families = families
        self._lineages = lineages
        self._audit = audit
        self._seek = seek
        self.lineage_header = families.names.lineage.encode()
        """The header, or metadata key, that an answer's lineage token goes out in; empty where it is switched off."""

    async def identify(self, raw: Iterable[tuple[str, str]]) -> Identified:
        """`raw`: headers or metadata, as bytes that were read as Latin-1. Waits only for a key that is not known."""
        headers = fold(raw)
        try:
            try:
                principal = self._principal(headers)
            except UnknownKeyId as error:
                if not await self._seek(error.kid):
                    raise
                principal = self._principal(headers)
        except EdgeError as error:
            self._audit.refused("credential", error.reason)
            raise
        return Identified(principal, headers, self._lineages.namespace.tenant_tag(principal.tenant))

    async def require_operator(self, raw: Iterable[tuple[str, str]]) -> Identified:
        """The caller, where it has the scope `operator`."""
        caller = await self.identify(raw)
        principal = caller.principal
        if not principal.may(Scope.OPERATOR):
            self._audit.refused("control", NO_SCOPE, tenant=principal.tenant, key_id=principal.key_id)
            raise EdgeError(Code.FORBIDDEN, "This needs the scope `operator`.", reason=NO_SCOPE)
        return caller

    def lineage(
        self,
        caller: Identified,
        *,
        body_conversation: str | None,
        cache_key: str | None,
        content: Callable[[], bytes],
        own: str = "",
        parent: str = "",
        explicit: bool = False,
    ) -> Believed:
        """`content`: what identifies a conversation that has no id; asked for only then. `own`: the conversation's id
        where it stands beside the headers (OpenEngine's `extra`); empty where it does not. `parent`: named in
        another dialect, whose signature was verified; empty where it is not. `explicit`: no agent sends such requests
        by itself, so a hint under any name is meant, and refused where it may not be believed.

        `Believed.token` belongs into the answer, under `lineage_header`.
        """
        principal, now_s = caller.principal, time.time()
        what = "hint"
        try:
            claim = self._families.read(caller.headers, body_conversation=body_conversation, cache_key=cache_key)
            claim = naming(claim, own, parent)
            if explicit:
                claim = dataclasses.replace(claim, explicit=True)
            what = "token"
            stated = self._lineages.stated(claim, principal, now_s)
            what = "hint"
            derived_from = content() if claim.conversation is None else b""
            believed = self._lineages.believe(claim, stated, principal, derived_from, now_s)
        except EdgeError as error:
            self._audit.refused(what, error.reason, tenant=principal.tenant, key_id=principal.key_id)
            raise
        if believed.ignored:
            self._audit.ignored(believed.said_by, believed.ignored, tenant=principal.tenant, key_id=principal.key_id)
        return believed

    def refused(self, what: str, error: EdgeError, principal: Principal) -> None:
        """Something else of a known caller was refused: for the audit."""
        self._audit.refused(what, error.reason, tenant=principal.tenant, key_id=principal.key_id)

    def cache_salt(self, caller: Identified, own: str) -> bytes:
        """Within what the request's prefixes are shared; a caller's `own` salt only narrows it."""
        return self._lineages.namespace.salt(caller.principal, own)

    def _principal(self, headers: Mapping[str, str]) -> Principal:
        return self._authenticator.authenticate(headers.get("authorization"), headers.get("x-api-key"), time.time())
