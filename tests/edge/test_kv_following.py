"""An edge follows its workers' KV events over both protocols, through gaps, lost links and restarts."""

from __future__ import annotations

from typing import Literal

import pytest

from edge.core.resident import Held, prints_of
from edge.core.types import WorkerId
from edge.driver import Driver
from edge.kv_following import NotKv, OpenEngineBatches, batch_from_link
from enginelink.v1 import link_pb2
from openengine.v1 import kv_pb2
from tests.edge.core.kv_caches import keys_of
from tests.edge.fakes import Heard, answer_to, fake_worker, linked_driver, make_turn, until
from tests.edge.kv_worker import BLOCK, KvWorker, serving
from worker.core.events import Cleared

Spoken = Literal["enginelink", "openengine"]
both = pytest.mark.parametrize("protocol", ["enginelink", "openengine"])


def known(driver: Driver, *path: int) -> int | None:
    """How many blocks of `path` the one worker of `driver` is known to hold."""
    [worker_id] = driver.fleet.workers
    return driver.fleet.kv.known_blocks(worker_id, prints_of(keys_of(path)))


def lose_a_batch(worker: KvWorker) -> None:
    """The cache changes, and the batch is kept nowhere: whoever follows is behind."""
    worker.cache.store((2, 3))
    worker.kv_events.last += 1
    worker.kv_events._batches.clear()


def skip_a_batch(worker: KvWorker) -> None:
    """The cache changes, and the one who follows is not told."""
    worker.cache.store((2, 3))
    worker.kv_events.deliver((), [Cleared()])
    [follower] = worker.kv_events._followers
    follower._next += 1


def store_unsaid(worker: KvWorker, path: tuple[int, ...]) -> None:
    """The cache holds what no event told of."""
    worker.cache.store(path)


@pytest.mark.anyio
@both
async def test_an_edge_knows_what_a_worker_held_and_what_changes(protocol: Spoken) -> None:
    worker = KvWorker("one")
    await worker.store(1, 2)
    async with serving(worker) as address, linked_driver([address], [address], protocol=protocol) as driver:
        await until(lambda: known(driver, 1, 2, 3) == 2)
        await worker.store(1, 2, 3)
        await until(lambda: known(driver, 1, 2, 3) == 3)
        await worker.act(lambda cache: cache.cool((1, 2), Held.HOST))
        await worker.act(lambda cache: cache.drop((1, 2, 3)))
        await until(lambda: known(driver, 1, 2, 3) == 2)
        await worker.act(lambda cache: cache.clear())
        await until(lambda: known(driver, 1) == 0)
        fleet_worker = driver.fleet.workers[WorkerId(address)]
        assert (fleet_worker.tokens_per_block, fleet_worker.cached_blocks) == (BLOCK, 0)
        await worker.store(1, 2)
        await until(lambda: fleet_worker.cached_blocks == 2)


@pytest.mark.anyio
@both
async def test_what_changed_while_a_link_was_lost_is_known_after_it(protocol: Spoken) -> None:
    worker = KvWorker("one")
    await worker.store(1, 2)
    async with serving(worker) as address:
        pass
    async with linked_driver([address], [address], protocol=protocol, wait=False) as driver:
        async with serving(worker, address):
            await until(lambda: known(driver, 1, 2) == 2)
        await until(lambda: known(driver, 1, 2) is None)
        await worker.act(lambda cache: cache.drop((1, 2)))
        await worker.store(3)
        async with serving(worker, address):
            await until(lambda: known(driver, 3) == 1)
            assert known(driver, 1, 2) == 1
    assert worker.snapshots == (1 if protocol == "enginelink" else 2), "EngineLink goes on from where it was"


@pytest.mark.anyio
@both
async def test_a_worker_that_started_again_leaves_no_ghosts(protocol: Spoken) -> None:
    before, after = KvWorker("one"), KvWorker("two")
    await before.store(1, 2)
    await after.store(1)
    async with serving(before) as address:
        pass
    async with linked_driver([address], [address], protocol=protocol, wait=False) as driver:
        async with serving(before, address):
            await until(lambda: known(driver, 1, 2) == 2)
        async with serving(after, address):
            await until(lambda: known(driver, 1, 2) == 1)


@pytest.mark.anyio
@both
async def test_a_gap_is_mended_by_a_snapshot(protocol: Spoken) -> None:
    worker = KvWorker("one")
    await worker.store(1)
    async with serving(worker) as address, linked_driver([address], [address], protocol=protocol) as driver:
        await until(lambda: known(driver, 1) == 1)
        await worker.on_loop(lambda: lose_a_batch(worker))
        await worker.store(4)
        await until(lambda: known(driver, 2, 3) == 2)
        assert known(driver, 4) == 1


@pytest.mark.anyio
async def test_a_batch_that_the_worker_leaves_out_is_asked_for_again() -> None:
    worker = KvWorker("one")
    await worker.store(1)
    async with serving(worker) as address, linked_driver([address], [address]) as driver:
        await until(lambda: known(driver, 1) == 1)
        await worker.on_loop(lambda: skip_a_batch(worker))
        await worker.store(4)
        await until(lambda: known(driver, 2, 3) == 2)
        assert driver.fleet.kv.workers[WorkerId(address)].gaps == 1


@pytest.mark.anyio
@both
async def test_blocks_behind_an_unknown_one_are_mended_by_a_snapshot(protocol: Spoken) -> None:
    worker = KvWorker("one")
    await worker.store(1)
    async with serving(worker) as address, linked_driver([address], [address], protocol=protocol) as driver:
        await until(lambda: known(driver, 1) == 1)
        await worker.on_loop(lambda: store_unsaid(worker, (2, 3)))
        await worker.store(2, 3, 4)
        await until(lambda: known(driver, 2, 3, 4) == 3)
        follower = driver.fleet.kv.workers[WorkerId(address)]
        assert (follower.unknown_parents, follower.gaps, follower.snapshots) == (1, 0, 2)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("protocol", "worker"),
    [
        ("openengine", KvWorker("refuses", on_loopback=False)),
        ("openengine", KvWorker("keeps none", max_batches=0)),
        ("enginelink", KvWorker("keeps none", max_batches=0)),
    ],
    ids=["openengine refused", "openengine off", "enginelink off"],
)
async def test_a_worker_that_tells_nothing_is_used_without(protocol: Spoken, worker: KvWorker) -> None:
    async with serving(worker) as address, linked_driver([address], [address], protocol=protocol) as driver:
        await worker.store(1)
        await until(lambda: driver.model_ready)
        assert known(driver, 1) is None


@pytest.mark.anyio
async def test_an_engine_without_events_answers_as_ever() -> None:
    with fake_worker() as (address, _):
        async with linked_driver([address], [address], protocol="openengine") as driver:
            turn, heard = make_turn(), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert known(driver, 1) is None


@pytest.mark.parametrize("keys", [b"", b"k" * 31, b"k" * 33])
def test_keys_of_another_length_are_not_read(keys: bytes) -> None:
    stored = link_pb2.KvEvents(events=[link_pb2.KvEvent(stored=link_pb2.KvStored(keys=keys))])
    removed = link_pb2.KvEvents(events=[link_pb2.KvEvent(removed=link_pb2.KvRemoved(keys=keys))])

    for events in (stored, removed):
        with pytest.raises(NotKv):
            batch_from_link(events)


@pytest.mark.parametrize(("value", "encoding"), [(b"k" * 8, "sha256"), (b"k" * 32, "xxh3"), (b"k" * 32, "")])
def test_blocks_that_an_engine_names_otherwise_are_not_taken_for_ours(value: bytes, encoding: str) -> None:
    stored = kv_pb2.BlockStored(block_hashes=[kv_pb2.KvBlockHash(value=value, encoding=encoding)])

    with pytest.raises(NotKv):
        OpenEngineBatches("e").read(kv_pb2.KvEventBatch(events=[kv_pb2.KvEvent(block_stored=stored)]))


def test_a_snapshot_in_several_batches_is_known_to_be_one() -> None:
    batches = OpenEngineBatches("e")
    read = [batches.read(kv_pb2.KvEventBatch(sequence_number=number)) for number in (7, 7, 8)]

    assert [(one.snapshot, one.begin) for one in read] == [(True, True), (True, False), (False, False)]
