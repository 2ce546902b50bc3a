"""A client that reads nothing of what is sent to it is let go, and finds that out when it looks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import numpy as np
import pytest

from openengine.v1 import error_pb2, kv_pb2, service_pb2_grpc
from tests.edge.kv_worker import KvWorker
from worker.core.events import Stored
from worker.core.outputs import TokenOut
from worker.core.tiers import Tier
from worker.core.types import Phase, Request, Sampling, Stopping
from worker.grpc_api import MAX_UNREAD, Answer
from worker.grpc_control import ControlService
from worker.refusal import Refused

pytestmark = pytest.mark.anyio
LITTLE = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384))
DEADLINE_S = 20.0
DROPPED = "kinroute_worker_kv_followers_dropped_total"


def much(number: int) -> Stored:
    """More than any buffer on the way takes."""
    keys = number.to_bytes(4, "little") * 8 * 4_000
    return Stored(b"p" * 32, keys, Tier.DEVICE, np.zeros(8_000, np.int32), True)


async def read_on(stream: Any) -> None:
    """To its end; raises what it ended with."""
    while isinstance(await stream.read(), kv_pb2.SubscribeKvEventsResponse):
        pass


async def test_a_subscriber_that_reads_nothing_finds_a_status() -> None:
    worker = KvWorker("one")
    server = grpc.aio.server()
    service_pb2_grpc.add_ControlServicer_to_server(ControlService(cast(Any, worker), 0.1), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(DEADLINE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LITTLE) as channel:
        asked = kv_pb2.SubscribeKvEventsRequest(include_snapshot=True)
        stream = service_pb2_grpc.ControlStub(channel).SubscribeKvEvents(asked)
        await stream.read()
        for number in range(8):
            worker.kv_events.deliver((), [much(number)])
        why = {"protocol": "openengine", "why": "unread"}
        while worker.metrics.registry.get_sample_value(DROPPED, why) == 0:
            await asyncio.sleep(0.01)

        with pytest.raises(grpc.aio.AioRpcError, match="unread") as ended:
            await read_on(stream)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


class Stuck:
    """A stream whose client reads nothing; or, `reads`, one message after the other."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)
        if not self.reads:
            await asyncio.Event().wait()


class Serves:
    """As little of a worker as an answer needs."""

    text = None

    def __init__(self, worker: KvWorker) -> None:
        self.requests, self.intake = worker.requests, self
        self.eos_token_ids: tuple[int, ...] = ()


def answered(tokens: int) -> Answer:
    """With so many tokens that wait to be written."""
    worker = KvWorker("one")
    key = worker.requests.next_key()
    request = Request(key, Phase.AGGREGATED, np.arange(4, dtype=np.int32), Sampling(), Stopping(tokens))
    answer = Answer(cast(Any, Serves(worker)), request, None, 0.05)
    answer.active = worker.requests.accept(request, "it", answer)
    worker.requests.deliver([TokenOut(key, 7, None) for _ in range(tokens)])
    return answer


async def test_an_answer_that_nobody_reads_ends_with_a_status() -> None:
    with pytest.raises(Refused) as refused:
        await answered(3).write_to(cast(Any, Stuck(reads=False)))

    assert refused.value.event().code == error_pb2.ERROR_CODE_OVERLOADED
    assert refused.value.event().retryable


async def test_a_client_that_is_too_far_behind_reads_that_as_its_last_event() -> None:
    stream = Stuck(reads=True)

    await answered(MAX_UNREAD + 3).write_to(cast(Any, stream))

    [last] = stream.written
    assert (last.error.code, last.request_id) == (error_pb2.ERROR_CODE_OVERLOADED, "it")
