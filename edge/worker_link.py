"""The edge's side of EngineLink: one long-lived stream to one worker."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import grpc
import structlog

from edge.channels import CONNECT_DEADLINE_S, Channels, Pauses
from edge.core.capabilities import Unusable, capabilities_of
from edge.core.errors import Code, EdgeError
from edge.core.fleet import Fleet
from edge.core.kv_index import Resume
from edge.core.life_events import Phase
from edge.core.types import ConversationKey, FinishReason, Lineage, TurnId, WorkerId
from edge.hints import Hints, Takes, taken_by
from edge.kv_following import NotKv, batch_from_link
from edge.legs import LegListener, LegOrder
from edge.outbox import Outbox
from edge.wire import (
    error_from,
    logprob_from,
    reason_from,
    response_message,
    retention_message,
    sampling_message,
    stopping_message,
)
from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import server_pb2, service_pb2_grpc

REVISION = 1
MAX_HANDLE = (1 << 32) - 1
WELCOME_DEADLINE_S = 600.0
"""A worker welcomes an edge once its model is loaded."""
PHASES = {
    Phase.CONTEXT: link_pb2.PHASE_CONTEXT,
    Phase.GENERATION: link_pb2.PHASE_GENERATION,
    Phase.AGGREGATED: link_pb2.PHASE_AGGREGATED,
}
STOP_REASONS = {
    FinishReason.STOP: link_pb2.STOP_REASON_END_OF_TURN,
    FinishReason.TOOL_CALLS: link_pb2.STOP_REASON_TOOL_CALL,
    FinishReason.LENGTH: link_pb2.STOP_REASON_LENGTH,
    FinishReason.CANCELLED: link_pb2.STOP_REASON_UNSPECIFIED,
    None: link_pb2.STOP_REASON_UNSPECIFIED,
}
log = structlog.get_logger()


class NotSpoken(Exception):
    """Raised when a worker does not know EngineLink."""


class _Broken(Exception):
    """Raised when a link ended, or what came on it is not EngineLink."""


class WorkerLink:
    """Sends what one turn of the event loop orders as one message; hears one message per engine step.

    A link that is lost fails its legs at once, and is opened again until `run` is cancelled.
    """

    def __init__(self, worker_id: WorkerId, edge_id: str, fleet: Fleet, hints: Hints, channels: Channels) -> None:
        self.worker_id = worker_id
        self._edge_id = edge_id
        self._fleet = fleet
        self._hints = hints
        self._channels = channels
        self._last_handle = 0
        self._listeners: dict[int, LegListener] = {}
        self._outbox = Outbox()
        self._instance_id = ""
        self._takes = Takes.NOTHING
        self._unproven: dict[int, tuple[LegOrder, int]] = {}
        """Legs whose envelope the worker has said nothing of yet, and which envelope it is."""
        self._signing_again: set[asyncio.Task[None]] = set()
        self._up = False

    async def run(self) -> None:
        """Raises NotSpoken where the worker speaks OpenEngine alone."""
        pauses = Pauses()
        told = ""
        while True:
            try:
                async with self._channels.open(self.worker_id) as channel:
                    await self._serve(channel)
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    await self._hints.reread()
            except TimeoutError:
                why = "no answer"
            except _Broken as broken:
                why = str(broken)
            if self._up:
                pauses.reset()
                log.warning("a link is lost", worker=self.worker_id, why=why)
            elif why != told:
                log.warning("a worker cannot be linked yet", worker=self.worker_id, why=why)
            told = why
            self._lose(why)
            await asyncio.sleep(pauses.next_s())

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """One link, from hello to its end, which raises."""
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            control = service_pb2_grpc.ControlStub(channel)
            info: server_pb2.ServerInfo = await control.GetServerInfo(server_pb2.GetServerInfoRequest())
        stream = link_pb2_grpc.EngineLinkStub(channel).Connect()
        hello = link_pb2.Hello(revision=REVISION, edge_id=self._edge_id, envelope=self._hints.link(info.instance_id))
        try:
            async with asyncio.timeout(WELCOME_DEADLINE_S):
                await stream.write(link_pb2.EdgeMessage(hello=hello))
                first: Any = await stream.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotSpoken from error
            raise
        if not isinstance(first, link_pb2.WorkerMessage) or not first.HasField("welcome"):
            raise _Broken("the worker did not say welcome")
        self._welcome(first.welcome)
        writer = asyncio.create_task(self._write(stream))
        try:
            while isinstance(message := await stream.read(), link_pb2.WorkerMessage):
                if message.HasField("kv_events"):
                    self._kv_events(message.kv_events)
                else:
                    self._step(message.step)
        finally:
            writer.cancel()
            # A stream that broke fails the writer too; the reader has told it already.
            await asyncio.gather(writer, return_exceptions=True)
            stream.cancel()
        raise _Broken("the worker closed the link")

    def _welcome(self, welcome: link_pb2.Welcome) -> None:
        self._instance_id = welcome.server.instance_id
        self._takes = taken_by(welcome.server)
        block = welcome.server.capacity.kv_block_size
        try:
            can = capabilities_of(welcome.server, welcome.model)
            self._fleet.joined(self.worker_id, self._instance_id, welcome.model.max_context_length, block, can)
        except Unusable as fault:
            raise _Broken(str(fault)) from fault
        self._outbox, self._up = Outbox(), True
        self._report(welcome.load)
        self._subscribe(self._fleet.follow(self.worker_id, self._instance_id))
        log.info("a worker is linked", worker=self.worker_id, instance=self._instance_id)

    def _subscribe(self, resume: Resume) -> None:
        self._outbox.subscribe(
            link_pb2.KvSubscribe(epoch=resume.epoch, after_sequence=resume.sequence, snapshot=resume.snapshot)
        )

    def _kv_events(self, events: link_pb2.KvEvents) -> None:
        try:
            is_whole = self._fleet.fed(self.worker_id, batch_from_link(events))
        except NotKv as fault:
            raise _Broken(f"the worker sent {fault}") from fault
        if not is_whole:
            log.info("KV events are missing, a snapshot is asked for", worker=self.worker_id)
            self._subscribe(Resume(events.epoch, events.sequence, snapshot=True))

    async def _write(self, stream: Any) -> None:
        while True:
            await stream.write(await self._outbox.take())

    def submit(self, order: LegOrder, listener: LegListener) -> int:
        handle = self._new_handle()
        self._listeners[handle] = listener
        if not self._up:
            asyncio.get_running_loop().call_soon(self._fail, handle, "the worker is not linked")
            return handle
        self._send_signed(handle, order, 1)
        return handle

    def _send_signed(self, handle: int, order: LegOrder, attempt: int) -> None:
        envelope = self._hints.envelope(order, self._instance_id, self._takes)
        if envelope:
            self._unproven[handle] = (order, attempt)
        self._send(handle, order, envelope)

    def _send(self, handle: int, order: LegOrder, envelope: str) -> None:
        self._outbox.submit(
            link_pb2.Submit(
                handle=handle,
                request_id=order.request_id,
                model=order.model,
                phase=PHASES[order.phase],
                token_ids=order.token_ids,
                sampling=sampling_message(order.sampling),
                stopping=stopping_message(order.stops),
                response=response_message(order.sampling),
                kv_session=order.kv_session,
                cache_salt=order.cache_salt.encode(),
                tenant_tag=order.tenant_tag,
                bypass_prefix_cache=order.bypass_prefix_cache,
                conversation_id=order.lineage.conversation,
                lineage=envelope,
                traceparent=order.traceparent,
                tracestate=order.tracestate,
                resumed_tokens=order.resumed_tokens,
                retention=retention_message(order.retention),
            )
        )

    def _lineage_refused(self, handle: int) -> None:
        """What this edge signed was no proof to the worker: that is no fault of the caller's. It is signed once more,
        with the keys as they are then; after that it goes without."""
        order, attempt = self._unproven.pop(handle)
        if attempt == 1:
            task = asyncio.get_running_loop().create_task(self._sign_again(handle, order))
            self._signing_again.add(task)
            task.add_done_callback(self._signing_again.discard)
        else:
            self._hints.given_up(self.worker_id)
            self._send(handle, order, "")

    async def _sign_again(self, handle: int, order: LegOrder) -> None:
        await self._hints.reread()
        if handle in self._listeners and self._up:
            self._send_signed(handle, order, 2)

    def _new_handle(self) -> int:
        """One that no live leg has, within what the wire holds, however long the edge runs."""
        handle = self._last_handle % MAX_HANDLE + 1
        while handle in self._listeners:
            handle = handle % MAX_HANDLE + 1
        self._last_handle = handle
        return handle

    def cancel(self, handle: int) -> None:
        self._unproven.pop(handle, None)
        if self._listeners.pop(handle, None) is not None and self._up:
            self._outbox.cancel(handle)

    def generating(self, conversation: ConversationKey) -> None:
        self._tell(link_pb2.ConversationUpdate(conversation_id=conversation, generating=link_pb2.Generating()))

    def ended(self, conversation: ConversationKey, reason: FinishReason | None, *, final: bool) -> None:
        told = link_pb2.Ended(reason=STOP_REASONS[reason], final=final)
        self._tell(link_pb2.ConversationUpdate(conversation_id=conversation, ended=told))

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str) -> None:
        """Nothing is sent where nothing can be signed: no worker would believe it."""
        envelope = self._hints.returned(lineage, turn_id, tenant, self._instance_id, self._takes)
        if envelope:
            told = link_pb2.Returned(envelope=envelope)
            self._tell(link_pb2.ConversationUpdate(conversation_id=lineage.conversation, returned=told))

    def _tell(self, update: link_pb2.ConversationUpdate) -> None:
        if self._up:
            self._outbox.update(update)

    def _step(self, step: link_pb2.Step) -> None:
        listeners = self._listeners
        if step.handles or step.token_ids:
            if len(step.handles) != len(step.token_ids) or len(step.handles) % 4:
                raise _Broken("the worker sent columns of unequal length")
            for handle, token_id in zip(array("I", step.handles), array("I", step.token_ids), strict=True):
                listener = listeners.get(handle)
                if listener is not None:
                    listener.token(token_id, None)
        for event in step.events:
            listener = listeners.get(event.handle)
            if listener is not None:
                self._event(event, listener)
        if step.HasField("load"):
            self._report(step.load)

    def _event(self, event: link_pb2.Event, listener: LegListener) -> None:
        if event.lineage_refused and event.handle in self._unproven:
            self._lineage_refused(event.handle)
            return
        self._unproven.pop(event.handle, None)
        match event.WhichOneof("event"):
            case "started":
                listener.started(event.started.cached_prompt_tokens)
            case "token":
                listener.token(event.token.token_id, logprob_from(event.token))
            case "prefill_ready":
                ready = event.prefill_ready
                listener.prefilled(ready.kv_session, ready.first_token.token_id, logprob_from(ready.first_token))
            case "kv_arrived":
                listener.kv_arrived()
            case "finished":
                del self._listeners[event.handle]
                listener.finished(reason_from(event.finished.reason))
            case "error":
                del self._listeners[event.handle]
                listener.failed(error_from(event.error), retryable=event.error.retryable)

    def _report(self, load: link_pb2.Load) -> None:
        self._fleet.reported(
            self.worker_id,
            load.running_requests + load.queued_requests,
            draining=load.draining,
            queued=load.queued_requests,
            blocks=(load.used_pages, load.total_pages),
        )

    def _lose(self, why: str) -> None:
        self._up = False
        self._fleet.lost(self.worker_id)
        for handle in list(self._listeners):
            self._fail(handle, why)

    def _fail(self, handle: int, why: str) -> None:
        self._unproven.pop(handle, None)
        listener = self._listeners.pop(handle, None)
        if listener is not None:
            log.info("a leg is lost", worker=self.worker_id, why=why)
            error = EdgeError(Code.WORKER_FAILED, "A worker was lost.", retryable=True, retry_after_s=1.0)
            listener.failed(error, retryable=True)
