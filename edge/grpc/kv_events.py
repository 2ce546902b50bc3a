"""Workers' KV events for the operator: one stream of several workers', each under its own rank.

Ranks are the workers of the configuration, counted from 0 by address. Numbers are each worker's own: they rise by one
within a rank. A snapshot comes first where it is asked for: of each rank, batches that all carry the number after
which they hold. A rank whose events have a gap, or cannot be had any more, ends the stream with one EngineError that
names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from edge.core.errors import Code, EdgeError
from edge.core.fleet import Fleet
from edge.core.types import WorkerId
from edge.grpc.door import Call
from edge.grpc.errors import event_of, invalid
from edge.grpc.info import workers_in_order
from openengine.v1 import error_pb2, kv_pb2, service_pb2_grpc

MAX_SUBSCRIBERS = 16
MAX_WAITING = 64
"""Batches on their way from the workers to one subscriber; beyond them the workers wait."""
CODES: Mapping[grpc.StatusCode, Code] = {
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID,
    grpc.StatusCode.UNIMPLEMENTED: Code.NOT_IMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.OVERLOADED,
}

Dial = Callable[[WorkerId], grpc.aio.Channel]


class KvEvents:
    """`dial`: a channel of its own to a worker."""

    def __init__(self, fleet: Fleet, dial: Dial, *, unread_deadline_s: float) -> None:
        self._fleet = fleet
        self._dial = dial
        self._unread_deadline_s = unread_deadline_s
        self._subscribers: set[asyncio.Queue[kv_pb2.SubscribeKvEventsResponse]] = set()
        self._ending: kv_pb2.SubscribeKvEventsResponse | None = None

    def close(self) -> None:
        """Every subscriber is told that this edge ends; it would not end before they do."""
        error = EdgeError(Code.OVERLOADED, "this edge is shutting down", retryable=True)
        self._ending = kv_pb2.SubscribeKvEventsResponse(error=event_of(error))
        for waiting in self._subscribers:
            while not waiting.empty():
                waiting.get_nowait()
            waiting.put_nowait(self._ending)

    def require_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Those asked for, each once; all where none is named. Raises EdgeError."""
        known = len(self._fleet.workers)
        asked = sorted(set(ranks))
        wrong = [rank for rank in asked if rank >= known]
        if wrong:
            raise invalid(f"data_parallel_ranks holds {wrong[0]}: there are {known}, from 0")
        return asked or list(range(known))

    async def serve(self, message: kv_pb2.SubscribeKvEventsRequest, call: Call) -> None:
        """Until the subscriber leaves, or a rank cannot be served on. Raises EdgeError before anything is sent, or
        where what is sent stays unread."""
        ranks = self.require_ranks(message.data_parallel_ranks)
        if message.start_sequence_number and len(ranks) > 1:
            raise invalid("start_sequence_number counts within one rank: name it in data_parallel_ranks")
        if self._ending is not None:
            raise EdgeError(Code.OVERLOADED, "this edge is shutting down", retryable=True)
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            full = f"{MAX_SUBSCRIBERS} subscribers follow KV events already"
            raise EdgeError(Code.OVERLOADED, full, retryable=True, retry_after_s=1.0)
        waiting: asyncio.Queue[kv_pb2.SubscribeKvEventsResponse] = asyncio.Queue(MAX_WAITING)
        self._subscribers.add(waiting)
        readers = [asyncio.create_task(self._read(rank, message, waiting)) for rank in ranks]
        try:
            while True:
                response = await waiting.get()
                await self._write(call, response)
                if response.HasField("error"):
                    return
        finally:
            self._subscribers.discard(waiting)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _write(self, call: Call, response: kv_pb2.SubscribeKvEventsResponse) -> None:
        try:
            async with asyncio.timeout(self._unread_deadline_s):
                await call.write(response)
        except TimeoutError:
            raise EdgeError(Code.RATE_LIMITED, "the KV events were left unread", retryable=True) from None

    async def _read(
        self,
        rank: int,
        message: kv_pb2.SubscribeKvEventsRequest,
        waiting: asyncio.Queue[kv_pb2.SubscribeKvEventsResponse],
    ) -> None:
        """One worker's events, to their end, which is told as an error."""
        error = error_pb2.EngineError(
            code=error_pb2.ERROR_CODE_INTERNAL, message="the worker ended its events", retryable=True
        )
        request = kv_pb2.SubscribeKvEventsRequest(
            include_snapshot=message.include_snapshot, start_sequence_number=message.start_sequence_number
        )
        worker_id = workers_in_order(self._fleet)[rank].worker_id
        try:
            async with self._dial(worker_id) as channel:
                stream: Any = service_pb2_grpc.ControlStub(channel).SubscribeKvEvents(request)
                async for response in stream:
                    if response.HasField("error"):
                        error = response.error
                        break
                    response.batch.data_parallel_rank = rank
                    await waiting.put(response)
        except grpc.aio.AioRpcError as failure:
            error = event_of(_error_of(failure))
        error.message = f"data-parallel rank {rank}: {error.message}"
        await waiting.put(kv_pb2.SubscribeKvEventsResponse(error=error))


def _error_of(failure: grpc.aio.AioRpcError) -> EdgeError:
    code = CODES.get(failure.code(), Code.WORKER_FAILED)
    is_gone = code is Code.WORKER_FAILED
    message = "its worker cannot be reached, or does not tell" if is_gone else failure.details() or failure.code().name
    return EdgeError(code, message, retryable=code in (Code.WORKER_FAILED, Code.OVERLOADED))
