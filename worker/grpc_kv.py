"""OpenEngine's KV events: one stream per subscriber, read from the log at the subscriber's own pace.

Numbers are of data-parallel rank 0, the only one, and rise by one. A snapshot comes first where it is asked for:
batches of `block_stored` that all carry the number after which they hold, at least one; the live batches that follow
it begin with the next number. Without a snapshot, `start_sequence_number` is the first batch wanted, and 0 means from
now on. A number that is not to be had, and a subscriber that is too slow, is one terminal EngineError; one that reads
nothing at all gets a status instead, which needs no room in what it left unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, TypeAlias

import grpc

from openengine.v1 import error_pb2, kv_pb2, server_pb2
from worker.kv_event_metrics import Drop, Spoken
from worker.kv_events import Behind, EventLog, Follower
from worker.kv_wire import openengine_batch
from worker.refusal import Refused, invalid, overloaded, unsupported

INSTANCE_METADATA = "kinroute-instance-id"
MAX_SUBSCRIBERS = 64
UNREAD_DEADLINE_S = 30.0

Stream: TypeAlias = grpc.aio.ServicerContext[kv_pb2.SubscribeKvEventsRequest, kv_pb2.SubscribeKvEventsResponse]


class Serving(Protocol):
    """What subscribers need of the worker. `abort_allowed`: its listener is reached by this machine's users, or by
    callers with a certificate, alone."""

    kv_events: EventLog
    abort_allowed: bool

    def server_info(self) -> server_pb2.ServerInfo: ...


class KvSubscribers:
    """Serves `SubscribeKvEvents`. Events hold what callers wrote, so they are for the operator alone."""

    def __init__(self, worker: Serving, unread_deadline_s: float = UNREAD_DEADLINE_S) -> None:
        self._worker = worker
        self._unread_deadline_s = unread_deadline_s
        self._metrics = worker.kv_events.metrics
        self._metrics.count_followers(Spoken.OPENENGINE, lambda: self._count)
        self._count = 0

    def sources(self, request: kv_pb2.GetKvEventSourcesRequest) -> kv_pb2.GetKvEventSourcesResponse:
        """None: nothing is published beside this service's own stream. Raises Refused."""
        _require_rank_0(request.data_parallel_ranks)
        return kv_pb2.GetKvEventSourcesResponse()

    async def serve(self, request: kv_pb2.SubscribeKvEventsRequest, stream: Stream) -> None:
        """Until the subscriber leaves, or cannot be served on. Raises Refused before anything is sent, or where what is
        sent stays unread."""
        log = self._worker.kv_events
        if not self._worker.abort_allowed:
            raise Refused(
                error_pb2.ERROR_CODE_INVALID_ARGUMENT,
                "KV events are served on loopback, or to callers with a certificate, alone",
                status=grpc.StatusCode.UNAUTHENTICATED,
            )
        _require_rank_0(request.data_parallel_ranks)
        if not log.is_on:
            raise unsupported("kv_cache_config.event_buffer_max_size is 0: this worker sends no KV events")
        if self._count >= MAX_SUBSCRIBERS:
            self._metrics.dropped(Spoken.OPENENGINE, Drop.FULL)
            raise overloaded(f"{MAX_SUBSCRIBERS} subscribers follow the KV events of this worker already")
        self._count += 1
        try:
            await stream.send_initial_metadata(((INSTANCE_METADATA, log.epoch),))
            await self._follow(request, stream)
        finally:
            self._count -= 1

    async def _follow(self, request: kv_pb2.SubscribeKvEventsRequest, stream: Stream) -> None:
        log = self._worker.kv_events
        block_size = self._worker.server_info().capacity.kv_block_size
        wake = asyncio.Event()
        start = None if request.include_snapshot else request.start_sequence_number or log.last + 1
        follower: Follower = log.follow(wake.set, start=start)
        has_read = request.include_snapshot
        while True:
            wake.clear()
            match follower.read():
                case None:
                    await wake.wait()
                case Behind() as behind:
                    if has_read:
                        self._metrics.dropped(Spoken.OPENENGINE, Drop.BEHIND)
                    await _end(stream, _too_slow(behind) if has_read else _not_kept(behind))
                    return
                case read:
                    has_read = True
                    response = kv_pb2.SubscribeKvEventsResponse(batch=openengine_batch(read, block_size))
                    try:
                        async with asyncio.timeout(self._unread_deadline_s):
                            await stream.write(response)
                    except TimeoutError:
                        self._metrics.dropped(Spoken.OPENENGINE, Drop.UNREAD)
                        raise overloaded("the KV events were left unread") from None


def _require_rank_0(ranks: Iterable[int]) -> None:
    wrong = [rank for rank in ranks if rank]
    if wrong:
        raise invalid(f"data_parallel_ranks holds {wrong[0]}: this worker is data-parallel rank 0 alone")


def _not_kept(behind: Behind) -> Refused:
    return invalid(
        f"start_sequence_number is {behind.wanted}: batches are kept from {behind.oldest} on; ask for a snapshot"
    )


def _too_slow(behind: Behind) -> Refused:
    return overloaded(f"batch {behind.wanted} is not kept any more, the oldest is {behind.oldest}: subscribe again")


async def _end(stream: Stream, refused: Refused) -> None:
    await stream.write(kv_pb2.SubscribeKvEventsResponse(error=refused.event()))
