"""A worker over plain OpenEngine: one `Generate` call per leg. For engines that do not speak EngineLink."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import grpc
import structlog
from google.protobuf import struct_pb2

from edge.core.errors import Code, EdgeError
from edge.core.fleet import Fleet
from edge.core.lifecycle import Phase
from edge.core.types import ConversationKey, FinishReason, WorkerId
from edge.legs import REQUEST_TYPES, LegListener, LegOrder
from edge.signing import EnvelopeSigner
from edge.wire import error_from, logprob_from, reason_from, response_message, sampling_message, stopping_message
from edge.worker_link import CHANNEL_OPTIONS, CONNECT_DEADLINE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S
from openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2, model_pb2, server_pb2, service_pb2_grpc

POLL_EVERY_S = 1.0
NOT_ACCEPTED = {
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID,
    grpc.StatusCode.UNIMPLEMENTED: Code.INVALID,
    grpc.StatusCode.NOT_FOUND: Code.MODEL_NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.OVERLOADED,
}
log = structlog.get_logger()


class OpenEngineWorker:
    """Polls the engine's health and load; each leg is a task that `run` owns."""

    def __init__(self, worker_id: WorkerId, model: str, fleet: Fleet, signer: EnvelopeSigner) -> None:
        self.worker_id = worker_id
        self._model = model
        self._fleet = fleet
        self._signer = signer
        self._handles = itertools.count(1)
        self._legs: dict[int, asyncio.Task[None]] = {}
        self._sessions: dict[int, bytes] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._inference: service_pb2_grpc.InferenceStub | None = None
        self._control: service_pb2_grpc.ControlStub | None = None
        self._instance_id = ""

    async def run(self) -> None:
        async with (
            grpc.aio.insecure_channel(self.worker_id, options=CHANNEL_OPTIONS) as channel,
            asyncio.TaskGroup() as tasks,
        ):
            self._tasks = tasks
            self._inference = service_pb2_grpc.InferenceStub(channel)
            self._control = service_pb2_grpc.ControlStub(channel)
            pause_s = FIRST_PAUSE_S
            while True:
                try:
                    await self._poll(self._control)
                    pause_s = POLL_EVERY_S
                except (grpc.aio.AioRpcError, TimeoutError):
                    self._fleet.lost(self.worker_id)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _poll(self, control: service_pb2_grpc.ControlStub) -> None:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            health: lifecycle_pb2.HealthResponse = await control.Health(lifecycle_pb2.HealthRequest())
            if health.state not in (lifecycle_pb2.HEALTH_STATE_READY, lifecycle_pb2.HEALTH_STATE_DEGRADED):
                self._fleet.lost(self.worker_id)
                return
            info: server_pb2.ServerInfo = await control.GetServerInfo(server_pb2.GetServerInfoRequest())
            if info.instance_id != self._instance_id or not self._fleet.workers[self.worker_id].ready:
                request = model_pb2.GetModelInfoRequest(model=self._model)
                model: model_pb2.ModelInfo = await control.GetModelInfo(request)
                self._instance_id = info.instance_id
                self._fleet.joined(self.worker_id, info.instance_id, model.max_context_length)
            load: server_pb2.LoadInfo = await control.GetLoad(server_pb2.GetLoadRequest())
        self._fleet.reported(self.worker_id, load.running_requests + load.queued_requests, draining=False)

    def submit(self, order: LegOrder, listener: LegListener) -> int:
        assert self._tasks is not None, "submitted before `run`"
        handle = next(self._handles)
        self._legs[handle] = self._tasks.create_task(self._leg(handle, order, listener))
        return handle

    def cancel(self, handle: int) -> None:
        task = self._legs.pop(handle, None)
        if task is not None:
            task.cancel()
        session = self._sessions.pop(handle, None)
        if session is not None and self._tasks is not None:
            self._tasks.create_task(self._abort(session))

    def generating(self, conversation: ConversationKey) -> None:
        """OpenEngine has no word for it."""

    def ended(self, conversation: ConversationKey, reason: FinishReason | None, *, final: bool) -> None:
        """OpenEngine has no word for it."""

    async def _abort(self, session: bytes) -> None:
        """Ends a pin; it would also expire by itself."""
        assert self._control is not None
        request = lifecycle_pb2.AbortRequest(kv_session=kv_pb2.KvSessionRef.FromString(session))
        try:
            await self._control.Abort(request, timeout=CONNECT_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                log.warning("a pin is left to expire", worker=self.worker_id, why=error.details())

    async def _leg(self, handle: int, order: LegOrder, listener: LegListener) -> None:
        try:
            await self._follow(handle, order, listener)
        except grpc.aio.AioRpcError as error:
            if self._legs.pop(handle, None) is not None:
                code = NOT_ACCEPTED.get(error.code(), Code.WORKER_FAILED)
                message = "A worker was lost." if code is Code.WORKER_FAILED else (error.details() or "refused")
                retryable = code in (Code.WORKER_FAILED, Code.OVERLOADED)
                listener.failed(EdgeError(code, message, retryable=retryable, retry_after_s=1.0), retryable=retryable)

    async def _follow(self, handle: int, order: LegOrder, listener: LegListener) -> None:
        assert self._inference is not None
        signed = self._signer.leg(order, self._instance_id) if order.phase is not Phase.GENERATION else ""
        metadata = (("kinroute-lineage", signed),) if signed else ()
        stream = self._inference.Generate(_request(order), metadata=metadata)
        # A generation leg's first token came with its reference and was sent then.
        skip = 1 if order.phase is Phase.GENERATION else 0
        started = False
        async for response in stream:
            event = response.WhichOneof("event")
            if event == "token":
                if not started:
                    started = True
                    (listener.kv_arrived if skip else lambda: listener.started(0))()
                for info in response.token.tokens[skip:]:
                    listener.token(info.token_id, logprob_from(info))
                skip = max(0, skip - len(response.token.tokens))
            elif event in ("prefill_ready", "finished", "error"):
                self._last(handle, response, listener)
                return

    def _last(self, handle: int, response: generation_pb2.GenerateResponse, listener: LegListener) -> None:
        if self._legs.pop(handle, None) is None:
            return
        match response.WhichOneof("event"):
            case "prefill_ready":
                session = response.prefill_ready.kv_session
                self._sessions[handle] = session.SerializeToString()
                listener.started(response.usage.cached_prompt_tokens)
                first = session.attributes_struct.fields["first_gen_tokens"].list_value.values[0]
                listener.prefilled(self._sessions[handle], int(first.number_value), None)
            case "finished":
                match = response.finished.stop_match
                if match.WhichOneof("match") in ("eos_token_id", "stop_token_id"):
                    # OpenEngine tells which token stopped it instead of sending that token.
                    listener.token(match.eos_token_id or match.stop_token_id, None)
                listener.finished(reason_from(response.finished.reason))
            case "error":
                listener.failed(error_from(response.error), retryable=response.error.retryable)


def _request(order: LegOrder) -> generation_pb2.GenerateRequest:
    extra = struct_pb2.Struct()
    extra.update({"request_type": REQUEST_TYPES[order.phase], "conversation_id": order.lineage.conversation})
    session = kv_pb2.KvSessionRef.FromString(order.kv_session) if order.kv_session else None
    # OpenEngine counts from this leg's own first token.
    stops = replace(
        order.stops,
        max_tokens=order.stops.max_tokens - order.resumed_tokens,
        min_tokens=max(0, order.stops.min_tokens - order.resumed_tokens),
    )
    return generation_pb2.GenerateRequest(
        request_id=order.request_id,
        model=order.model,
        token_ids=generation_pb2.TokenIds(ids=memoryview(order.token_ids).cast("I")),
        sampling=sampling_message(order.sampling),
        stopping=stopping_message(stops),
        response=response_message(order.sampling),
        kv=generation_pb2.KvOptions(session=session, cache_salt=order.cache_salt),
        extra=extra,
    )
