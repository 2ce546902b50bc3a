"""A worker over plain OpenEngine: one `Generate` call per leg. For engines that do not speak EngineLink."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from configuration.tls import ClientMaterial
from edge.channels import CONNECT_DEADLINE_S, Channels, Pauses
from edge.core.capabilities import OURS, Unusable, capabilities_of, require_spoken
from edge.core.errors import Code, EdgeError
from edge.core.fleet import Fleet
from edge.core.life_events import Phase
from edge.core.types import ConversationKey, FinishReason, Lineage, TurnId, WorkerId
from edge.hints import LINEAGE, Hints, Metadata, Takes, taken_by
from edge.kv_following import NotKv, OpenEngineBatches
from edge.legs import LegListener, LegOrder
from edge.openengine_wire import first_token_of, generate_call
from edge.raw_messages import cannot_be_replayed, session_in
from edge.wire import error_from, logprob_from, reason_from
from openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2, model_pb2, server_pb2, service_pb2_grpc

POLL_EVERY_S = 1.0
GENERATE = "/openengine.v1.Inference/Generate"
INSTANCE_METADATA = "kinroute-instance-id"
REFUSED_LINEAGE = ("kinroute-refused", "lineage")
SERVING = (lifecycle_pb2.HEALTH_STATE_READY, lifecycle_pb2.HEALTH_STATE_DEGRADED)
NOT_ACCEPTED = {
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID,
    grpc.StatusCode.UNIMPLEMENTED: Code.INVALID,
    grpc.StatusCode.NOT_FOUND: Code.MODEL_NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.OVERLOADED,
}
UNFOLLOWED = {
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
}
log = structlog.get_logger()


class _NotFollowed(Exception):
    """Raised when an engine's KV events are of no use: it goes on without."""


class OpenEngineWorker:
    """Polls the engine's health and load; each leg is a task that `run` owns."""

    def __init__(
        self,
        worker_id: WorkerId,
        model: str,
        fleet: Fleet,
        hints: Hints,
        channels: Channels,
        *,
        shares_caches: bool = False,
    ) -> None:
        """`shares_caches`: an engine that cannot keep tenants' caches apart is used too."""
        self.worker_id = worker_id
        self._model = model
        self._fleet = fleet
        self._hints = hints
        self._channels = channels
        self._shares_caches = shares_caches
        self._can = OURS
        self._handles = itertools.count(1)
        self._legs: dict[int, asyncio.Task[None]] = {}
        self._sessions: dict[int, bytes] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._generate: Any = None
        self._control: service_pb2_grpc.ControlStub | None = None
        self._instance_id = ""
        self._takes = Takes.NOTHING

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                material = self._channels.material
                async with self._channels.open(self.worker_id) as channel:
                    # Without codecs: references go through as the bytes that they are.
                    opened: Any = channel
                    self._generate = opened.unary_stream(GENERATE)
                    self._control = service_pb2_grpc.ControlStub(channel)
                    following = tasks.create_task(self._follow_kv(self._control))
                    await self._poll_while(self._control, material)
                    following.cancel()

    async def _poll_while(self, control: service_pb2_grpc.ControlStub, material: ClientMaterial | None) -> None:
        """Until the engine is lost, nothing runs there, and `material` is not what channels are opened with now."""
        pauses = Pauses()
        told = ""
        while True:
            try:
                await self._poll(control)
                why = ""
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
            except TimeoutError:
                why = "no answer"
            except Unusable as fault:
                why = str(fault)
            if why:
                self._fleet.lost(self.worker_id)
                if why != told:
                    log.warning("a worker cannot be used", worker=self.worker_id, why=why)
                if material is not self._channels.material and not self._legs:
                    return
                await asyncio.sleep(pauses.next_s())
            else:
                pauses.reset()
                await asyncio.sleep(POLL_EVERY_S)
            told = why

    async def _poll(self, control: service_pb2_grpc.ControlStub) -> None:
        """Brings the fleet up to date, or raises."""
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            health: lifecycle_pb2.HealthResponse = await control.Health(lifecycle_pb2.HealthRequest())
            if health.state not in SERVING:
                raise Unusable("it says that it is not ready")
            info: server_pb2.ServerInfo = await control.GetServerInfo(server_pb2.GetServerInfoRequest())
            require_spoken(info)
            if info.instance_id != self._instance_id or not self._fleet.workers[self.worker_id].ready:
                request = model_pb2.GetModelInfoRequest(model=self._model)
                model: model_pb2.ModelInfo = await control.GetModelInfo(request)
                can = capabilities_of(info, model)
                if not (can.salts or can.bypasses or self._shares_caches):
                    raise Unusable(
                        "it says neither supports_cache_salt nor supports_prefix_cache_bypass, so tenants would share "
                        "its cache: allow_shared_prefix_cache takes it nevertheless"
                    )
                block = info.capacity.kv_block_size
                self._fleet.joined(self.worker_id, info.instance_id, model.max_context_length, block, can)
                self._instance_id, self._takes, self._can = info.instance_id, taken_by(info), can
            requests = await self._requests(control)
        self._fleet.reported(self.worker_id, requests, draining=False)

    async def _follow_kv(self, control: service_pb2_grpc.ControlStub) -> None:
        """Again and again while the engine is there; of a start of it whose events are of no use, not again."""
        pauses = Pauses()
        unfollowed = ""
        while True:
            if self._instance_id and self._instance_id != unfollowed and self._fleet.workers[self.worker_id].ready:
                instance_id = self._instance_id
                try:
                    await self._kv_events(control, instance_id)
                    pauses.reset()
                except grpc.aio.AioRpcError as error:
                    if error.code() in UNFOLLOWED:
                        unfollowed = instance_id
                        log.info("a worker's KV events are not to be had", worker=self.worker_id, why=error.details())
                except (_NotFollowed, NotKv) as fault:
                    unfollowed = instance_id
                    log.info("a worker's KV events are of no use", worker=self.worker_id, why=str(fault))
                self._fleet.unfollow(self.worker_id)
            await asyncio.sleep(pauses.next_s())

    async def _kv_events(self, control: service_pb2_grpc.ControlStub, instance_id: str) -> None:
        """One subscription, to its end: one that missed something is ended, and the next begins with a snapshot."""
        stream = control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(include_snapshot=True))
        try:
            metadata = await stream.initial_metadata()
            epoch = next((value for key, value in metadata if key == INSTANCE_METADATA), None)
            if epoch is None:
                # A refusal has no metadata either, and says why.
                await stream.read()
                raise _NotFollowed("it does not say which start of it numbers them")
            if epoch != instance_id:
                return
            batches = OpenEngineBatches(epoch)
            self._fleet.follow(self.worker_id, epoch)
            async for response in stream:
                if response.HasField("error"):
                    log.info("KV events are missing", worker=self.worker_id, why=response.error.message)
                    return
                if not self._fleet.fed(self.worker_id, batches.read(response.batch)):
                    return
        finally:
            stream.cancel()

    async def _requests(self, control: service_pb2_grpc.ControlStub) -> int:
        """How many it runs and queues. Of an engine that does not say, none but our own are known."""
        try:
            load: server_pb2.LoadInfo = await control.GetLoad(server_pb2.GetLoadRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return 0
        return load.running_requests + load.queued_requests

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

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str) -> None:
        """OpenEngine has no word for it."""

    async def _abort(self, session: bytes) -> None:
        """Ends a pin; it would also expire by itself."""
        assert self._control is not None
        proof = self._hints.link(self._instance_id) if self._takes is Takes.ENVELOPE else ""
        metadata = ((LINEAGE, proof),) if proof else ()
        request = lifecycle_pb2.AbortRequest(kv_session=kv_pb2.KvSessionRef.FromString(session))
        try:
            await self._control.Abort(request, metadata=metadata, timeout=CONNECT_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                log.warning("a pin is left to expire", worker=self.worker_id, why=error.details())

    async def _leg(self, handle: int, order: LegOrder, listener: LegListener) -> None:
        try:
            await self._follow_hinted(handle, order, listener)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                # Nothing more goes there until a poll finds it again.
                self._fleet.lost(self.worker_id)
            code = NOT_ACCEPTED.get(error.code(), Code.WORKER_FAILED)
            if order.phase is Phase.GENERATION and error.code() is grpc.StatusCode.NOT_FOUND:
                # The pages are gone: the prompt may be prefilled again.
                code = Code.WORKER_FAILED
            message = "A worker was lost." if code is Code.WORKER_FAILED else (error.details() or "refused")
            self._fail(handle, listener, code, message)
        else:
            # Only where the stream ended before its terminal event.
            self._fail(handle, listener, Code.WORKER_FAILED, "A worker's answer has no end.")

    def _fail(self, handle: int, listener: LegListener, code: Code, message: str) -> None:
        """Does nothing to a leg that is over."""
        if self._legs.pop(handle, None) is not None:
            retryable = code in (Code.WORKER_FAILED, Code.OVERLOADED)
            listener.failed(EdgeError(code, message, retryable=retryable, retry_after_s=1.0), retryable=retryable)

    async def _follow_hinted(self, handle: int, order: LegOrder, listener: LegListener) -> None:
        """A hint that the engine refuses is no fault of the caller's: it is signed once more, with the keys and for the
        start of the engine that are there then; after that the leg goes without."""
        assert self._control is not None
        for attempt in (1, 2):
            metadata = self._hints.metadata(order, self._instance_id, self._takes)
            try:
                await self._follow(handle, order, listener, metadata)
                return
            except grpc.aio.AioRpcError as error:
                if not metadata or not _refuses_lineage(error):
                    raise
            if attempt == 1:
                await self._hints.reread()
                with contextlib.suppress(TimeoutError, Unusable):
                    await self._poll(self._control)
        self._hints.given_up(self.worker_id)
        await self._follow(handle, order, listener, ())

    async def _follow(self, handle: int, order: LegOrder, listener: LegListener, metadata: Metadata) -> None:
        assert self._generate is not None
        stream = self._generate(generate_call(order, self._can), metadata=metadata)
        # A generation leg's first token came with its reference and was sent then.
        skip = 1 if order.phase is Phase.GENERATION else 0
        has_arrived = order.phase is not Phase.GENERATION
        async for encoded in stream:
            try:
                response = generation_pb2.GenerateResponse.FromString(encoded)
            except DecodeError:
                break
            event = response.WhichOneof("event")
            if event == "token":
                if not has_arrived:
                    has_arrived = True
                    listener.kv_arrived()
                for info in response.token.tokens[skip:]:
                    listener.token(info.token_id, logprob_from(info))
                skip = max(0, skip - len(response.token.tokens))
            elif event in ("prefill_ready", "finished", "error"):
                self._last(handle, order.phase, response, session_in(encoded), listener)
                return

    def _last(
        self,
        handle: int,
        phase: Phase,
        response: generation_pb2.GenerateResponse,
        session: bytes | None,
        listener: LegListener,
    ) -> None:
        """`session`: the reference in a `prefill_ready`, as it came."""
        if handle not in self._legs:
            return
        if phase is not Phase.GENERATION:
            # Nothing says how much was cached before the usage at the end does.
            listener.started(response.usage.cached_prompt_tokens)
        match response.WhichOneof("event"):
            case "prefill_ready":
                self._prefilled(handle, response.prefill_ready.kv_session, session, listener)
            case "finished":
                del self._legs[handle]
                match = response.finished.stop_match
                if match.WhichOneof("match") in ("eos_token_id", "stop_token_id"):
                    # OpenEngine tells which token stopped it instead of sending that token.
                    listener.token(match.eos_token_id or match.stop_token_id, None)
                listener.finished(reason_from(response.finished.reason))
            case "error":
                del self._legs[handle]
                listener.failed(error_from(response.error), retryable=response.error.retryable)

    def _prefilled(
        self, handle: int, session: kv_pb2.KvSessionRef, encoded: bytes | None, listener: LegListener
    ) -> None:
        first_token = first_token_of(session)
        why = "it does not hold its first token" if first_token is None else cannot_be_replayed(session)
        if first_token is None or encoded is None or why is not None:
            log.warning("a reference is of no use", worker=self.worker_id, why=why or "its bytes are not found")
            self._fail(handle, listener, Code.WORKER_FAILED, "A worker's reference cannot be handed on.")
            return
        del self._legs[handle]
        self._sessions[handle] = encoded
        listener.prefilled(encoded, first_token, None)


def _refuses_lineage(error: grpc.aio.AioRpcError) -> bool:
    """Our workers mark it; an engine that speaks TensorRT-LLM's dialect names the metadata that it does not believe."""
    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        return False
    trailing: Any = error.trailing_metadata()
    return REFUSED_LINEAGE in tuple(trailing) or "subagent-affinity" in (error.details() or "")
