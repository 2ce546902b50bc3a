"""EngineLink's server: one stream per edge, one message per engine step and edge."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, OrderedDict, deque
from typing import Protocol

import grpc
import structlog

from enginelink.v1 import link_pb2, link_pb2_grpc
from worker.answers import REASONS, error_of, stop_match_of, token_info, usage_of
from worker.commands import Heard, PinEnded, Rejected, Returned, Told
from worker.core.conversations import News, StopReason
from worker.core.outputs import Failed, Finished, HandoffReady, KvArrived, Started, TokenOut
from worker.intake import Intake
from worker.kv_event_metrics import Drop, Spoken
from worker.kv_events import Behind, EventLog, Follower
from worker.kv_wire import LinkEncoder
from worker.lineage import Envelopes
from worker.refusal import Refused, overloaded
from worker.requests import Active, Requests
from worker.unreadable import MESSAGE, UNREADABLE

REVISION = 1
MAX_CONVERSATIONS = 65_536
MAX_WAITING_STEPS = 2048
EDGE_ID_BYTES = 128

log = structlog.get_logger()

Stream = grpc.aio.ServicerContext[link_pb2.EdgeMessage, link_pb2.WorkerMessage]


class Serving(Protocol):
    """What a link needs of the worker."""

    requests: Requests
    intake: Intake
    envelopes: Envelopes
    kv_events: EventLog

    async def until_ready(self) -> None: ...
    def welcome(self) -> link_pb2.Welcome: ...
    def link_load(self) -> link_pb2.Load: ...
    def step_number(self) -> int: ...
    def session_of(self, active: Active, output: HandoffReady) -> bytes: ...


class LinkService(link_pb2_grpc.EngineLinkServicer):  # type: ignore[misc]  # generated code is untyped
    """Accepts links; each is a `Link` for as long as its stream lives."""

    def __init__(self, worker: Serving) -> None:
        self._worker = worker
        self._encoder = LinkEncoder(worker.kv_events.epoch)
        self.links: set[Link] = set()
        worker.kv_events.metrics.count_followers(Spoken.ENGINELINK, lambda: sum(link.follows for link in self.links))

    async def Connect(self, request_iterator: object, context: Stream) -> None:
        """Returns when the edge closes, or is cancelled when it is lost: either ends its requests at once."""
        hello: object = await context.read()
        if not isinstance(hello, link_pb2.EdgeMessage) or not hello.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must hold hello")
        if hello.hello.revision != REVISION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"hello.revision is {hello.hello.revision}: this worker speaks {REVISION}",
            )
        try:
            self._worker.envelopes.require_link(hello.hello.envelope)
        except Refused as refused:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refused.message)
        await self._worker.until_ready()
        link = Link(self._worker, hello.hello.edge_id[:EDGE_ID_BYTES], self._encoder)
        self.links.add(link)
        log.info("an edge is linked", edge=link.edge_id)
        try:
            await context.write(link_pb2.WorkerMessage(welcome=self._worker.welcome()))
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(link.write_to(context))
                violation = await link.read_from(context)
                writer.cancel()
        finally:
            self.links.discard(link)
            link.lose()
            log.info("an edge is gone", edge=link.edge_id)
        if violation:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, violation)


class Link:
    """One edge. Its requests end with it; an edge that does not read loses them, not its link."""

    def __init__(self, worker: Serving, edge_id: str, encoder: LinkEncoder) -> None:
        self.edge_id = edge_id
        self._encoder = encoder
        self._follower: Follower | None = None
        self._worker = worker
        self._requests = worker.requests
        self._by_handle: dict[int, Active] = {}
        self._generating_elsewhere: OrderedDict[str, bool] = OrderedDict()
        """Of each conversation that it submitted, whether it says that a generation leg runs elsewhere."""
        self._happened: list[tuple[Active, Told]] = []
        self._waiting: deque[link_pb2.WorkerMessage] = deque()
        self._wake = asyncio.Event()

    @property
    def follows(self) -> bool:
        """The edge hears of the cache."""
        return self._follower is not None

    async def read_from(self, stream: Stream) -> str:
        """Until the edge closes; returns what it did that no edge may, or nothing."""
        while True:
            message: object = await stream.read()
            if message is UNREADABLE:
                return MESSAGE
            if not isinstance(message, link_pb2.EdgeMessage):
                return ""
            for submit in message.submits:
                if submit.handle in self._by_handle or not submit.handle:
                    return f"submit.handle is {submit.handle}, which is in use or 0"
                self._submit(submit)
            for cancel in message.cancels:
                active = self._by_handle.pop(cancel.handle, None)
                if active is not None:
                    self._requests.cancel(active)
            for update in message.updates:
                self._hear(update)
            if message.HasField("kv_subscribe"):
                self._follow(message.kv_subscribe)

    async def write_to(self, stream: Stream) -> None:
        """Steps first; what is known of the cache when none waits, so that no token is late for it."""
        while True:
            self._wake.clear()
            message = self._waiting.popleft() if self._waiting else self._kv_events()
            if message is None:
                await self._wake.wait()
            else:
                await stream.write(message)

    def lose(self) -> None:
        """The edge is gone: its requests end, and nobody is left to say how its legs elsewhere end."""
        self.close()
        for conversation, is_generating in self._generating_elsewhere.items():
            if is_generating:
                self._requests.hear(Heard(conversation, News.ENDED))

    def close(self) -> None:
        for active in self._by_handle.values():
            self._requests.cancel(active)
        self._by_handle.clear()

    def _follow(self, asked: link_pb2.KvSubscribe) -> None:
        """In the place of what was followed before."""
        log = self._worker.kv_events
        if log.is_on:
            resumes = asked.epoch == log.epoch and not asked.snapshot
            self._follower = log.follow(self._wake.set, start=asked.after_sequence + 1 if resumes else None)
            self._wake.set()

    def _kv_events(self) -> link_pb2.WorkerMessage | None:
        """An edge that is too slow, or asks for what is not kept, gets a snapshot."""
        if self._follower is None:
            return None
        read = self._follower.read()
        if isinstance(read, Behind):
            self._worker.kv_events.metrics.dropped(Spoken.ENGINELINK, Drop.BEHIND)
            self._follower.restart()
            read = self._follower.read()
        return None if read is None or isinstance(read, Behind) else self._encoder.message(read)

    def take(self, active: Active, output: Told) -> None:
        self._happened.append((active, output))

    def flush(self) -> None:
        """What happened becomes one Step; tokens that came alone go into its columns.

        A Step may be empty but for the load, which the end of a pin changes.
        """
        happened, self._happened = self._happened, []
        times = Counter(active.handle for active, _ in happened)
        handles, token_ids = array("I"), array("I")
        step = link_pb2.Step(number=self._worker.step_number(), load=self._worker.link_load())
        for active, output in happened:
            if type(output) is TokenOut and output.logprobs is None and times[active.handle] == 1:
                handles.append(active.handle)
                token_ids.append(output.token_id)
            elif type(output) is PinEnded:
                self._by_handle.pop(active.handle, None)
            else:
                step.events.append(self._event(active, output))
        step.handles, step.token_ids = handles.tobytes(), token_ids.tobytes()
        self._send(step)

    def _event(self, active: Active, output: Told) -> link_pb2.Event:
        event = link_pb2.Event(handle=active.handle)
        match output:
            case TokenOut():
                event.token.CopyFrom(token_info(output.token_id, output.logprobs))
            case Started():
                event.started.cached_prompt_tokens = output.cached_tokens
            case KvArrived():
                event.kv_arrived.SetInParent()
            case HandoffReady():
                event.prefill_ready.kv_session = self._worker.session_of(active, output)
                event.prefill_ready.first_token.CopyFrom(token_info(output.first_token, output.logprobs))
                event.prefill_ready.usage.CopyFrom(usage_of(active))
            case Finished():
                self._by_handle.pop(active.handle, None)
                event.finished.reason = REASONS[output.reason]
                match = stop_match_of(output, self._worker.intake.eos_token_ids)
                if match is not None:
                    event.finished.stop_match.CopyFrom(match)
                event.finished.usage.CopyFrom(usage_of(active))
            case Failed():
                self._by_handle.pop(active.handle, None)
                event.error.CopyFrom(error_of(output))
            case Rejected():
                self._by_handle.pop(active.handle, None)
                event.error.CopyFrom(output.refused.event())
        return event

    def _submit(self, submit: link_pb2.Submit) -> None:
        try:
            self._requests.require_open(submit.request_id)
            request = self._worker.intake.from_submit(self._requests.next_key(), submit)
        except Refused as refused:
            event = link_pb2.Event(handle=submit.handle, error=refused.event(), lineage_refused=refused.is_lineage)
            self._send(link_pb2.Step(number=self._worker.step_number(), events=[event], load=self._worker.link_load()))
            return
        self._by_handle[submit.handle] = self._requests.accept(request, submit.request_id, self, submit.handle)
        if request.conversation:
            self._generating_elsewhere.setdefault(request.conversation, False)
            self._generating_elsewhere.move_to_end(request.conversation)
            if len(self._generating_elsewhere) > MAX_CONVERSATIONS:
                forgotten, is_generating = self._generating_elsewhere.popitem(last=False)
                if is_generating:
                    self._requests.hear(Heard(forgotten, News.ENDED))

    def _hear(self, update: link_pb2.ConversationUpdate) -> None:
        """An edge is believed of the conversations that it submitted on this very link; of others, that they returned,
        where it is signed."""
        conversation, told = update.conversation_id, update.WhichOneof("update")
        if told == "returned":
            self._hear_of_return(conversation, update.returned.envelope)
            return
        if conversation not in self._generating_elsewhere:
            return
        match told:
            case "generating":
                self._generating_elsewhere[conversation] = True
                self._requests.hear(Heard(conversation, News.GENERATING))
            case "ended":
                self._generating_elsewhere[conversation] = False
                reason = StopReason(update.ended.reason)
                self._requests.hear(Heard(conversation, News.ENDED, reason, update.ended.final))
            case "closed":
                self._requests.hear(Heard(conversation, News.CLOSED, final=True))

    def _hear_of_return(self, conversation: str, envelope: str) -> None:
        """What may not be believed is logged and dropped: nobody waits for an answer."""
        try:
            turn = self._worker.envelopes.returned_turn(envelope, conversation)
        except Refused:
            return
        self._requests.hear(Returned(conversation, turn))

    def _send(self, step: link_pb2.Step) -> None:
        if len(self._waiting) >= MAX_WAITING_STEPS:
            step = self._cut_off()
        self._waiting.append(link_pb2.WorkerMessage(step=step))
        self._wake.set()

    def _cut_off(self) -> link_pb2.Step:
        """The edge does not read: its requests end, and what waited for it is forgotten."""
        log.warning(
            "an edge does not read; its requests are cancelled", edge=self.edge_id, requests=len(self._by_handle)
        )
        self._requests.count_slow_consumer()
        self._waiting.clear()
        error = overloaded(f"the edge left {MAX_WAITING_STEPS} steps unread").event()
        step = link_pb2.Step(number=self._worker.step_number(), load=self._worker.link_load())
        step.events.extend(link_pb2.Event(handle=handle, error=error) for handle in self._by_handle)
        self.close()
        return step
