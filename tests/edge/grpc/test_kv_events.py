"""The operator follows workers' KV events through the edge: ranks, snapshots, numbers, and how a stream ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from openengine.v1 import error_pb2, kv_pb2
from tests.edge.core.kv_caches import keys_of
from tests.edge.grpc.harness import DEADLINE_S, OPERATOR_KEY, Client, FrontEnd, front_end
from tests.edge.kv_worker import KvWorker, serving

pytestmark = pytest.mark.anyio
INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED


class Operator:
    """Ranks are addresses in order: 0 is nobody's, `workers` are the others. `edge` serves them."""

    def __init__(self, client: Client, edge: FrontEnd, workers: list[KvWorker]) -> None:
        self.edge = edge
        self.workers = workers
        self._client = client

    def follow(self, *ranks: int, snapshot: bool = False, start: int = 0) -> Any:
        asked = kv_pb2.SubscribeKvEventsRequest(
            data_parallel_ranks=ranks, include_snapshot=snapshot, start_sequence_number=start
        )
        return self._client.control.SubscribeKvEvents(asked, metadata=self._client.metadata(), timeout=DEADLINE_S)


@asynccontextmanager
async def following(folder: Path, **options: Any) -> AsyncIterator[Operator]:
    one, two = KvWorker("one", **options), KvWorker("two")
    async with serving(one) as first, serving(two) as second:
        by_address = dict(sorted({first: one, second: two}.items()))
        with front_end(folder, workers=[*by_address]) as edge, edge.client(OPERATOR_KEY) as client:
            yield Operator(client, edge, list(by_address.values()))


def stored(response: kv_pb2.SubscribeKvEventsResponse) -> bytes:
    """The keys of the blocks that it says are stored."""
    return b"".join(block.value for event in response.batch.events for block in event.block_stored.block_hashes)


def place(response: kv_pb2.SubscribeKvEventsResponse) -> tuple[int, int]:
    return response.batch.data_parallel_rank, response.batch.sequence_number


async def test_a_snapshot_comes_first_and_what_changes_follows_it(text_folder: Path) -> None:
    async with following(text_folder) as operator:
        worker = operator.workers[0]
        await worker.store(1, 2)
        stream = operator.follow(1, snapshot=True)
        first = next(stream)
        await worker.store(3)
        second = next(stream)
        stream.cancel()

    assert stored(first) == keys_of((1, 2))
    assert stored(second) == keys_of((3,))
    assert (place(first), place(second)) == ((1, 1), (1, 2))


async def test_each_worker_tells_under_its_own_rank(text_folder: Path) -> None:
    async with following(text_folder) as operator:
        await operator.workers[0].store(1)
        await operator.workers[1].store(2)
        stream = operator.follow(1, 2, snapshot=True)
        told = {place(one): stored(one) for one in (next(stream), next(stream))}
        stream.cancel()

    assert told == {(1, 1): keys_of((1,)), (2, 1): keys_of((2,))}


async def test_numbers_begin_where_they_are_asked_to(text_folder: Path) -> None:
    async with following(text_folder) as operator:
        for token in (1, 2, 3):
            await operator.workers[1].store(token)
        stream = operator.follow(2, start=2)
        told = [next(stream), next(stream)]
        stream.cancel()

    assert [place(one) for one in told] == [(2, 2), (2, 3)]
    assert stored(told[0]) == keys_of((2,))


async def test_a_number_that_is_not_kept_is_one_error_that_names_the_rank(text_folder: Path) -> None:
    async with following(text_folder) as operator:
        (last,) = operator.follow(1, start=100)

    assert last.error.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert "rank 1" in last.error.message
    assert "snapshot" in last.error.message


async def test_a_worker_that_cannot_be_reached_ends_the_stream(text_folder: Path) -> None:
    async with following(text_folder) as operator:
        *_, last = operator.follow(snapshot=True)

    assert last.error.code == error_pb2.ERROR_CODE_INTERNAL
    assert last.error.retryable
    assert last.error.message.startswith("data-parallel rank 0: ")


async def test_an_edge_that_ends_says_so(text_folder: Path) -> None:
    async with serving(KvWorker("one")) as address:
        with front_end(text_folder, workers=[address]) as edge:
            client = edge.client(OPERATOR_KEY)
            stream = Operator(client, edge, []).follow(1, snapshot=True)
            next(stream)
        (last,) = stream
        client.channel.close()

    assert last.error.code == error_pb2.ERROR_CODE_OVERLOADED
    assert last.error.retryable


@pytest.mark.parametrize(
    ("ranks", "start", "named"),
    [((3,), 0, "data_parallel_ranks"), ((1, 2), 5, "start_sequence_number"), ((), 5, "start_sequence_number")],
)
async def test_what_makes_no_sense_is_invalid(
    text_folder: Path, ranks: tuple[int, ...], start: int, named: str
) -> None:
    async with following(text_folder) as operator:
        stream = operator.follow(*ranks, start=start)
        with pytest.raises(grpc.RpcError):
            next(stream)

    assert stream.code() == INVALID
    assert named in stream.details()


async def test_events_hold_prompts_so_they_are_no_tenants(edge: FrontEnd, client: Client) -> None:
    stream = client.control.SubscribeKvEvents(
        kv_pb2.SubscribeKvEventsRequest(), metadata=client.metadata(), timeout=DEADLINE_S
    )
    with pytest.raises(grpc.RpcError):
        next(stream)

    assert stream.code() == DENIED
