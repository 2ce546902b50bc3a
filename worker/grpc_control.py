"""OpenEngine's Control service: what this worker is and how it is, and ending requests."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message

from openengine.v1 import kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, server_pb2, service_pb2_grpc
from worker.core.outputs import LoadSnapshot
from worker.grpc_kv import UNREAD_DEADLINE_S, KvSubscribers, Stream
from worker.info import ROLES
from worker.kv_events import EventLog
from worker.lineage import Envelopes
from worker.metadata import LINEAGE, envelope_in
from worker.refusal import Refused
from worker.requests import Active, Requests

PROBE_DEADLINE_S = 10.0

Context: TypeAlias = grpc.aio.ServicerContext[Message, Message]


class Serving(Protocol):
    """What the service needs of the worker."""

    requests: Requests
    envelopes: Envelopes
    kv_events: EventLog
    model_name: str
    abort_allowed: bool

    @property
    def role(self) -> str: ...
    def is_starting(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def checks(self) -> list[tuple[str, bool, str]]: ...
    def load(self) -> LoadSnapshot: ...
    def server_info(self) -> server_pb2.ServerInfo: ...
    def model_info(self) -> model_pb2.ModelInfo: ...
    def pinned_by(self, session_id: str) -> Active | None: ...
    async def probe(self) -> str: ...


class ControlService(service_pb2_grpc.ControlServicer):  # type: ignore[misc]  # generated code is untyped
    """Methods that are not here answer UNIMPLEMENTED."""

    def __init__(self, worker: Serving, unread_deadline_s: float = UNREAD_DEADLINE_S) -> None:
        """`unread_deadline_s`: how long a subscriber may leave unread what was sent to it."""
        self._worker = worker
        self._subscribers = KvSubscribers(worker, unread_deadline_s)

    async def GetServerInfo(self, message: server_pb2.GetServerInfoRequest, context: Context) -> server_pb2.ServerInfo:
        await self._require_loaded(context)
        return self._worker.server_info()

    async def GetModelInfo(self, message: model_pb2.GetModelInfoRequest, context: Context) -> model_pb2.ModelInfo:
        if message.model != self._worker.model_name:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"model is {message.model!r}: this worker serves {self._worker.model_name!r}"
            )
        await self._require_loaded(context)
        return self._worker.model_info()

    async def GetLoad(self, message: server_pb2.GetLoadRequest, context: Context) -> server_pb2.LoadInfo:
        await self._require_loaded(context)
        load = self._worker.load()
        info = server_pb2.LoadInfo(
            instance_id=self._worker.server_info().instance_id,
            timestamp_unix_nanos=time.time_ns(),
            running_requests=load.running,
            queued_requests=load.queued,
            active_kv_sessions=self._worker.requests.pinned,
            used_kv_blocks=load.used_pages,
            total_kv_blocks=load.total_pages,
            waiting_tokens=load.queued_tokens,
        )
        if message.include_per_rank:
            # Data-parallel ranks, of which a worker is one.
            info.ranks.add(
                data_parallel_rank=0,
                running_requests=load.running,
                queued_requests=load.queued,
                used_kv_blocks=load.used_pages,
                total_kv_blocks=load.total_pages,
            )
        return info

    async def Health(self, message: lifecycle_pb2.HealthRequest, context: Context) -> lifecycle_pb2.HealthResponse:
        """STARTING until the model is warm; READY only if every check asked for is."""
        worker = self._worker
        response = lifecycle_pb2.HealthResponse()
        for name, good, why in worker.checks():
            response.checks.add(name=name, state=_state(good), message=why)
        if message.model:
            good = message.model == worker.model_name
            response.checks.add(name="model", state=_state(good), message="" if good else f"serves {worker.model_name}")
        if message.role:
            good = message.role in {ROLES[worker.role], server_pb2.ENGINE_ROLE_UNSPECIFIED}
            response.checks.add(name="role", state=_state(good), message="" if good else f"its role is {worker.role}")
        if message.include_inference_probe and worker.is_ready():
            try:
                async with asyncio.timeout(PROBE_DEADLINE_S):
                    why = await worker.probe()
            except TimeoutError:
                why = f"no token in {PROBE_DEADLINE_S:.0f} s"
            response.checks.add(name="inference_probe", state=_state(not why), message=why)
        good = worker.is_ready() and all(check.state == lifecycle_pb2.HEALTH_STATE_READY for check in response.checks)
        response.state = lifecycle_pb2.HEALTH_STATE_STARTING if worker.is_starting() else _state(good)
        return response

    async def Abort(self, message: lifecycle_pb2.AbortRequest, context: Context) -> lifecycle_pb2.AbortResponse:
        requests = self._worker.requests
        try:
            self._worker.envelopes.require_link(envelope_in(context.invocation_metadata() or ()))
        except Refused:
            why = f"Abort needs an envelope of purpose link in {LINEAGE}, but on loopback or with a certificate"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        match message.WhichOneof("target"):
            case "request_id":
                found = requests.find(message.request_id)
                if found is None and requests.ended_lately(message.request_id):
                    return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED)
                if found is None:
                    await _not_found(context, f"request_id {message.request_id!r} is not known here")
                requests.abort(found)
            case "kv_session":
                pinned = self._worker.pinned_by(message.kv_session.session_id)
                if pinned is None:
                    await _not_found(context, f"kv_session {message.kv_session.session_id!r} is not held here")
                requests.cancel(pinned)
            case "all_requests":
                for active in requests.all():
                    requests.abort(active)
            case _:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "target is missing: give exactly one")
        return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ABORTED)

    async def GetKvEventSources(
        self, message: kv_pb2.GetKvEventSourcesRequest, context: Context
    ) -> kv_pb2.GetKvEventSourcesResponse:
        try:
            return self._subscribers.sources(message)
        except Refused as refused:
            await context.abort(refused.status, refused.message)
            raise AssertionError("abort does not return") from refused

    async def SubscribeKvEvents(self, message: kv_pb2.SubscribeKvEventsRequest, context: Stream) -> None:
        if self._worker.is_starting():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        try:
            await self._subscribers.serve(message, context)
        except Refused as refused:
            await context.abort(refused.status, refused.message)

    async def LoadLora(self, message: lora_pb2.LoadLoraRequest, context: Context) -> lora_pb2.LoadLoraResponse:
        return await _no_lora(context)

    async def UnloadLora(self, message: lora_pb2.UnloadLoraRequest, context: Context) -> lora_pb2.UnloadLoraResponse:
        return await _no_lora(context)

    async def ListLoras(self, message: lora_pb2.ListLorasRequest, context: Context) -> lora_pb2.ListLorasResponse:
        return await _no_lora(context)

    async def _require_loaded(self, context: Context) -> None:
        if self._worker.is_starting():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")


def _state(good: bool) -> lifecycle_pb2.HealthState:
    return lifecycle_pb2.HEALTH_STATE_READY if good else lifecycle_pb2.HEALTH_STATE_NOT_READY


async def _not_found(context: Context, message: str) -> NoReturn:
    await context.abort(grpc.StatusCode.NOT_FOUND, message)
    raise AssertionError("abort does not return")


async def _no_lora(context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "LoRA adapters are not served")
    raise AssertionError("abort does not return")
