"""A hot route: one POST from its first byte to its last, as plain ASGI."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from edge.core.admission import Admission
from edge.core.errors import Code, EdgeError
from edge.driver import Driver
from edge.http.answering import Answering
from edge.http.asgi import Headers, Receive, Scope, Send, raw_headers, request_id
from edge.http.asked import Kind
from edge.http.body import BodyParser, ClientGone, RequestBody
from edge.http.errors import refuse_unread, send_error
from edge.http.fields import Fields, invalid, wrong_type
from edge.http.limit_headers import LimitHeaders
from edge.http.models import Catalogue, ServedModel
from edge.http.params import Bounds
from edge.http.recent import RecentRequests, RequestRecord
from edge.http.turns import make_turns
from edge.identity import Identified, Identities
from edge.settings import Limits
from edge.telemetry import Metrics
from enginelink.retention import RetentionBounds

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """What every hot route works with."""

    identities: Identities
    admission: Admission
    catalogue: Catalogue
    driver: Driver
    limits: Limits
    metrics: Metrics
    recent: RecentRequests
    bodies: BodyParser = field(default_factory=BodyParser)


class AnswerRoute:
    """Serves one kind of answer.

    The key is checked and the tenant's share taken before a byte of the body is read, so strangers cost little.
    """

    def __init__(self, kind: Kind, parts: Parts) -> None:
        self._kind = kind
        self._parts = parts
        limits = parts.limits
        retention = RetentionBounds(limits.tenant_max_retention_priority, limits.tenant_max_retention_duration_ms)
        self._bounds = Bounds(limits.choices, limits.prompts, limits.messages, retention)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._parts
        own_id = request_id(scope)
        record = RequestRecord(own_id.decode(), self._kind.path)
        body = RequestBody(scope, receive, parts.limits.body_bytes)
        parts.recent.add(record)
        parts.metrics.active += 1
        send = LimitHeaders(send, parts.admission)
        try:
            await self._serve(record, body, scope, receive, send)
        except ClientGone:
            record.gone()
            parts.metrics.disconnects += 1
        except EdgeError as error:
            record.failed(error)
            if body.is_whole:
                await send_error(send, error, own_id)
            else:
                await refuse_unread(receive, send, error, own_id)
        finally:
            record.duration_s = record.age_s
            parts.metrics.active -= 1
            parts.metrics.ended(record.path, record.status, record.duration_s)
            if record.error:
                log.info("a request failed", request_id=record.request_id, status=record.status, why=record.error)

    async def _serve(
        self, record: RequestRecord, body: RequestBody, scope: Scope, receive: Receive, send: LimitHeaders
    ) -> None:
        """Raises EdgeError as long as nothing was sent, and ClientGone."""
        parts = self._parts
        caller = await parts.identities.identify(raw_headers(scope))
        send.principal = principal = caller.principal
        record.tenant = principal.tenant
        parts.admission.begin(principal, time.monotonic())
        try:
            values = await parts.bodies.parse(principal.tenant, await body.read())
            await self._answer(record, caller, values, scope, receive, send)
        finally:
            parts.admission.end(principal)

    async def _answer(
        self,
        record: RequestRecord,
        caller: Identified,
        values: Mapping[str, Any],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        parts = self._parts
        model = self._model(values)
        record.model = model.name
        asked = self._kind.read(values, model, self._bounds)
        fields = Fields(values)
        believed = parts.identities.lineage(
            caller,
            body_conversation=_conversation(fields),
            cache_key=fields.text("prompt_cache_key"),
            content=asked.identifying_content,
        )
        record.ignored_lineage = believed.told
        salt = parts.identities.cache_salt(caller, fields.text("cache_salt") or "")
        if not parts.driver.max_context_length:
            raise EdgeError(Code.OVERLOADED, "No worker is ready.", retryable=True, retry_after_s=1.0)
        prompts = await asked.tokenize(salt, caller.tenant_tag)
        turns = make_turns(
            asked,
            prompts,
            model=model.name,
            caller=caller,
            believed=believed,
            cache_salt=salt,
            max_context_length=parts.driver.max_context_length,
            param=self._kind.content_param,
        )
        principal = caller.principal
        parts.admission.prompt(principal, sum(map(len, prompts)) // 4, time.monotonic())

        def spend(tokens: int) -> None:
            parts.admission.charge(principal, tokens, time.monotonic())

        lineage = self._lineage_header(believed.token)
        answering = Answering(parts.driver, parts.limits, parts.metrics, record, spend, lineage)
        await answering.deliver(asked, turns, self._kind.prefix, scope, receive, send)

    def _lineage_header(self, token: str) -> Headers:
        name = self._parts.identities.lineage_header
        return [(name, token.encode())] if name and token else []

    def _model(self, values: Mapping[str, Any]) -> ServedModel:
        name = values.get("model")
        if type(name) is not str or not name:
            raise invalid("model", "You must provide a model parameter, as a string.")
        return self._parts.catalogue.find(name)


def _conversation(fields: Fields) -> str | None:
    params = fields.members("conversation_params") or {}
    conversation = params.get("conversation_id")
    if conversation is not None and type(conversation) is not str:
        raise wrong_type("conversation_params.conversation_id", "a string", conversation)
    return conversation
