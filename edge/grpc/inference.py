"""OpenEngine's Inference service: whole turns, and single legs for callers that drive both phases themselves."""

from __future__ import annotations

import dataclasses
import os
import time

import structlog

from edge.core.errors import Code, EdgeError
from edge.core.lineage import Believed
from edge.core.seals import LIFE_S, Opened, Seals
from edge.core.types import Turn, TurnId
from edge.grpc.answer import Answer
from edge.grpc.asked import BOTH_PHASES, SEEDS, Asked, read_asked
from edge.grpc.door import Call, Caller, Door
from edge.grpc.hints import believed_of, require_rank
from edge.grpc.output import Output, Producing
from edge.grpc.requests import Requests
from edge.grpc.signed_hints import SignedHints
from edge.http.recent import RequestRecord
from edge.http.route import Parts
from edge.http.turns import trace
from edge.single_leg import Prefill, SingleLeg
from enginelink.retention import RetentionBounds
from openengine.v1 import kv_pb2

PATH = "openengine.v1.Inference/Generate"
log = structlog.get_logger()


class Inference:
    def __init__(self, parts: Parts, door: Door, seals: Seals, requests: Requests, signed_hints: SignedHints) -> None:
        self._parts = parts
        self._door = door
        self._seals = seals
        self._requests = requests
        self._signed_hints = signed_hints
        limits = parts.limits
        self._bounds = RetentionBounds(limits.tenant_max_retention_priority, limits.tenant_max_retention_duration_ms)

    async def generate(self, call: Call) -> None:
        """A refusal is a status; after acceptance a failure is one terminal event, then OK, but for a caller that reads
        nothing: it finds a status."""
        parts, principal = self._parts, call.caller.principal
        record = RequestRecord("", PATH, tenant=principal.tenant)
        parts.recent.add(record)
        parts.metrics.active += 1
        try:
            parts.admission.begin(principal, time.monotonic())
            try:
                await self._serve(call, record)
            finally:
                parts.admission.end(principal)
            record.status = record.status or 200
        except EdgeError as error:
            record.failed(error)
            raise
        finally:
            if not record.status:
                record.gone()
                parts.metrics.disconnects += 1
            record.duration_s = record.age_s
            parts.metrics.active -= 1
            parts.metrics.ended(PATH, record.status, record.duration_s)
            if record.error:
                log.info("a request failed", request_id=record.request_id, status=record.status, why=record.error)

    async def _serve(self, call: Call, record: RequestRecord) -> None:
        """Raises EdgeError as long as nothing was sent, or what was sent is not read."""
        parts, caller = self._parts, call.caller
        message = await call.message()
        asked = read_asked(message, parts.catalogue, max_outputs=parts.limits.choices, bounds=self._bounds)
        record.request_id, record.model = asked.request_id, asked.model.name
        require_rank(caller.metadata, asked)
        opened = self._opened(asked, caller)
        believed = believed_of(parts.identities, self._signed_hints, caller, asked, message.model)
        record.ignored_lineage = believed.told

        def seal(prefill: Prefill) -> kv_pb2.KvSessionRef:
            return self._seals.seal(
                prefill.kv_session, tenant=caller.tenant, instance_id=prefill.pin[0], now_s=time.time()
            )

        answer = Answer(
            asked,
            seal=seal,
            went_on=lambda: self._note(answer, record, caller),
            unread_deadline_s=parts.limits.stalled_client_timeout_s,
        )
        with self._requests.held(caller.tenant, asked.request_id, answer.abort):
            try:
                await self._answer(call, asked, answer, record, believed, opened)
            finally:
                answer.close()
                self._note_end(answer, record)

    async def _answer(
        self,
        call: Call,
        asked: Asked,
        answer: Answer,
        record: RequestRecord,
        believed: Believed,
        opened: Opened | None,
    ) -> None:
        parts, caller = self._parts, call.caller
        turn = await self._turn(asked, caller, believed)
        parts.admission.prompt(caller.principal, turn.prompt_tokens, time.monotonic())
        record.prompt_tokens = answer.prompt_tokens = turn.prompt_tokens
        header = parts.identities.lineage_header.decode()
        token = [(header, believed.token)] if header and believed.token else []
        answer.metadata = [*token, *self._door.limits_of(caller.principal)]

        def produce(output: Output) -> Producing:
            if opened is not None:
                return SingleLeg.generation(
                    parts.driver, turn, output, kv_session=opened.reference, pulled_from=opened.instance_id
                )
            if asked.request_type != BOTH_PHASES:
                return SingleLeg.context(parts.driver, turn, output, pin_life_s=LIFE_S)
            return parts.driver.start(_numbered(turn, output.index), output)

        answer.start(produce)
        is_told = False
        try:
            error = await answer.deliver(call)
            is_told = True
        finally:
            prefill = answer.outputs[0].prefill
            if prefill is not None and not is_told:
                # Nobody has its reference, so nobody will fetch its pages.
                parts.driver.pins.abort(prefill.pin)
            parts.metrics.slow_clients += answer.was_unread
        record.status = 200
        if error is not None:
            record.failed(error)

    async def _turn(self, asked: Asked, caller: Caller, believed: Believed) -> Turn:
        """Raises EdgeError."""
        parts = self._parts
        salt = parts.identities.cache_salt(caller.identified, asked.cache_salt)
        longest = parts.driver.max_context_length
        if not longest:
            raise EdgeError(Code.OVERLOADED, "No worker is ready.", retryable=True, retry_after_s=1.0)
        token_ids = await asked.tokenize(salt, caller.identified.tenant_tag)
        room = longest - len(token_ids) // 4
        if room < 1:
            raise EdgeError(
                Code.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(token_ids) // 4} tokens, and the model's context {longest}: it must be shorter",
            )
        headers = caller.identified.headers
        return Turn(
            turn_id=TurnId(os.urandom(16).hex()),
            model=asked.model.name,
            token_ids=token_ids,
            sampling=asked.sampling,
            stops=asked.stops(room),
            principal=caller.principal,
            lineage=believed.lineage,
            cache_salt=salt,
            tenant_tag=caller.identified.tenant_tag,
            traceparent=trace(headers, "traceparent"),
            tracestate=trace(headers, "tracestate"),
            retention=asked.retention,
            bypass_prefix_cache=asked.bypass_prefix_cache and self._parts.limits.tenant_bypass_prefix_cache,
        )

    def _opened(self, asked: Asked, caller: Caller) -> Opened | None:
        """What a generation leg is to fetch: from a worker that is known, under a reference that we gave this tenant.
        Raises EdgeError."""
        if asked.session is None:
            return None
        try:
            opened = self._seals.open(asked.session, tenant=caller.tenant, now_s=time.time())
        except EdgeError as error:
            self._parts.identities.refused("seal", error, caller.principal)
            raise
        workers = self._parts.driver.fleet.workers.values()
        if all(worker.instance_id != opened.instance_id for worker in workers):
            raise EdgeError(Code.KV_SESSION_NOT_FOUND, "kv.session: its worker is gone", retryable=False)
        return opened

    def _note(self, answer: Answer, record: RequestRecord, caller: Caller) -> None:
        """Tokens came: they are charged as they do."""
        if record.first_token_s is None and answer.completion_tokens:
            record.first_token_s = record.age_s
            self._parts.metrics.first_token.observe(record.first_token_s)
        more = answer.completion_tokens - record.completion_tokens
        record.completion_tokens += more
        if more:
            self._parts.admission.charge(caller.principal, more, time.monotonic())

    def _note_end(self, answer: Answer, record: RequestRecord) -> None:
        metrics = self._parts.metrics
        record.receipts = [output.producing.receipt for output in answer.outputs if output.producing is not None]
        record.cached_tokens = answer.usage.cached_prompt_tokens
        metrics.prompt_tokens += record.prompt_tokens
        metrics.cached_tokens += record.cached_tokens
        metrics.completion_tokens += record.completion_tokens


def _numbered(turn: Turn, index: int) -> Turn:
    """Each output is a turn of its own; where a seed was given, they count up."""
    if index == 0:
        return turn
    sampling = turn.sampling
    if sampling.seed is not None:
        sampling = dataclasses.replace(sampling, seed=(sampling.seed + index) % SEEDS)
    return dataclasses.replace(turn, turn_id=TurnId(os.urandom(16).hex()), sampling=sampling)
