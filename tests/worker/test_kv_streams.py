"""KV events of a real worker of two ranks, over EngineLink and over OpenEngine; and who does not get them."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from enginelink.block_keys import BlockScope, block_keys, scope_key
from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, generation_pb2, kv_pb2, service_pb2_grpc
from tests.tiny_models import make_tiny_model
from tests.worker.clients import DEADLINE_S, Edge, OpenEngine, generate_request, status_of
from tests.worker.running import Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
BLOCK = 4
SALT = "a tenant's"
_firsts = itertools.count(1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    cache = {"tokens_per_block": BLOCK, "max_tokens": 1024, "event_buffer_max_size": 16}
    model = make_tiny_model(folder / "model")
    with worker(folder, model, tensor_parallel_size=2, kv_cache_config=cache) as started:
        started.wait_for("ready")
        yield started


def new_prompt(tokens: int = 12) -> list[int]:
    """One that no test has used before."""
    number = next(_firsts)
    return [number // 200, number % 200, *(40 + place % 200 for place in range(tokens - 2))]


def keys_of(prompt: Sequence[int], salt: str = SALT) -> list[bytes]:
    tokens = np.array(prompt, "<u4").tobytes()
    return list(block_keys(scope_key(BlockScope(salt.encode())), tokens, BLOCK))


def answer(running: Running, prompt: Sequence[int]) -> None:
    with OpenEngine(running.grpc) as client:
        client.answer(generate_request(prompt, 2, kv=generation_pb2.KvOptions(cache_salt=SALT)))
    # What the last step computed is committed with the plan that lets go of it.
    running.wait_clean()


def clear(running: Running) -> None:
    request = urllib.request.Request(f"http://{running.admin}/kinroute/v1/cache/clear", method="POST")
    with urllib.request.urlopen(request, timeout=30.0):  # noqa: S310 - the worker under test
        pass


def next_batch(events: Iterator[link_pb2.KvEvents]) -> link_pb2.KvEvents:
    """The next that is no part of a snapshot."""
    return next(one for one in events if not one.snapshot)


def stored_keys(batches: Sequence[link_pb2.KvEvents]) -> set[bytes]:
    return {
        event.stored.keys[at : at + 32]
        for batch in batches
        for event in batch.events
        for at in range(0, len(event.stored.keys), 32)
    }


def test_an_edge_hears_what_a_prompt_leaves_in_the_cache(running: Running) -> None:
    prompt = new_prompt()
    with Edge(running.grpc) as edge:
        edge.subscribe()
        events = edge.kv_events()
        first = next(events)
        assert (first.epoch, first.snapshot, first.snapshot_begin) == (edge.welcome.server.instance_id, True, True)

        answer(running, prompt)
        batch = next_batch(events)

    stored = batch.events[0].stored
    assert batch.sequence == first.sequence + 1
    assert stored.keys == b"".join(keys_of(prompt))
    assert (stored.begins, stored.parent) == (True, scope_key(BlockScope(SALT.encode())))
    assert stored.medium == link_pb2.MEDIUM_DEVICE


def test_an_edge_that_comes_back_goes_on_from_where_it_was(running: Running) -> None:
    with Edge(running.grpc) as edge:
        edge.subscribe()
        held = next(edge.kv_events())
    first, second = new_prompt(), new_prompt()
    answer(running, first)
    answer(running, second)

    with Edge(running.grpc) as edge:
        edge.subscribe(held.epoch, held.sequence)
        batches = list(itertools.islice(edge.kv_events(), 2))

    assert [batch.sequence for batch in batches] == [held.sequence + 1, held.sequence + 2]
    assert not any(batch.snapshot for batch in batches)
    assert stored_keys(batches) >= {*keys_of(first), *keys_of(second)}


@pytest.mark.parametrize("asked", ["another start's", "numbers that never were", "batches that are gone", "as it says"])
def test_an_edge_that_cannot_go_on_gets_a_snapshot(running: Running, asked: str) -> None:
    prompt = new_prompt()
    for _ in range(20):
        answer(running, new_prompt())
    answer(running, prompt)
    with Edge(running.grpc) as edge:
        epoch = edge.welcome.server.instance_id
        match asked:
            case "another start's":
                edge.subscribe("another", 1)
            case "numbers that never were":
                edge.subscribe(epoch, 1_000_000)
            case "batches that are gone":
                edge.subscribe(epoch, 0)
            case _:
                edge.subscribe(epoch, 1_000_000, snapshot=True)
        part = next(edge.kv_events())

    assert (part.snapshot, part.snapshot_begin, part.snapshot_end) == (True, True, True)
    assert set(keys_of(prompt)) <= stored_keys([part])


def test_clearing_the_cache_is_told_and_nothing_of_it_is_left(running: Running) -> None:
    answer(running, new_prompt())
    with Edge(running.grpc) as edge:
        edge.subscribe()
        events = edge.kv_events()
        next(events)
        clear(running)
        assert next_batch(events).events[-1].WhichOneof("event") in {"cleared", "removed"}

        edge.subscribe(snapshot=True)
        assert not stored_keys([next(one for one in events if one.snapshot)])


def subscribe(client: OpenEngine, **asked: Any) -> Any:
    """The call: its responses, in order."""
    return client.control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(**asked), timeout=DEADLINE_S)


def test_an_openengine_subscriber_gets_a_snapshot_and_then_what_changes(running: Running) -> None:
    before, after = new_prompt(), new_prompt()
    answer(running, before)
    with OpenEngine(running.grpc) as client, Edge(running.grpc) as edge:
        stream = subscribe(client, include_snapshot=True, data_parallel_ranks=[0])
        metadata = dict(stream.initial_metadata())
        snapshot = next(stream).batch
        answer(running, after)
        live = next(stream).batch
        stream.cancel()

    assert metadata["kinroute-instance-id"] == edge.welcome.server.instance_id
    held = {one.value for event in snapshot.events for one in event.block_stored.block_hashes}
    assert set(keys_of(before)) <= held
    assert live.sequence_number == snapshot.sequence_number + 1
    assert live.timestamp_unix_nanos > snapshot.timestamp_unix_nanos > 0
    told = live.events[0].block_stored
    assert [one.value for one in told.block_hashes] == keys_of(after)
    assert {one.encoding for one in told.block_hashes} == {"sha256"}
    assert not told.HasField("parent_block_hash"), "it begins a prompt"
    assert list(told.token_ids) == after
    assert (told.block_size, told.medium) == (BLOCK, kv_pb2.STORAGE_MEDIUM_GPU)


def changed(held: set[bytes], batch: kv_pb2.KvEventBatch) -> set[bytes]:
    """What a cache of one tier holds after `batch`."""
    for event in batch.events:
        stored, removed = event.block_stored.block_hashes, event.block_removed.block_hashes
        held = (held | {one.value for one in stored}) - {one.value for one in removed}
        if event.HasField("all_blocks_cleared"):
            held = set()
    return held


def test_who_applies_every_batch_knows_what_a_new_snapshot_holds(running: Running) -> None:
    """Through evictions and a cleared cache; numbers rise by one."""
    with OpenEngine(running.grpc) as client:
        stream = subscribe(client, include_snapshot=True)
        first = next(stream).batch
        for number in range(12):
            answer(running, new_prompt(200))
            if number == 5:
                clear(running)
        later = subscribe(client, include_snapshot=True)
        snapshot = next(later).batch
        later.cancel()

        held, sequence, removals = changed(set(), first), first.sequence_number, 0
        while sequence < snapshot.sequence_number:
            batch = next(stream).batch
            assert batch.sequence_number == sequence + 1
            held, sequence = changed(held, batch), batch.sequence_number
            removals += sum(event.HasField("block_removed") for event in batch.events)
        stream.cancel()
    clear(running)
    assert held == changed(set(), snapshot)
    assert removals > 0


def test_blocks_behind_others_name_the_one_in_front_of_them(running: Running) -> None:
    prompt = new_prompt(8)
    answer(running, prompt)
    longer = [*prompt, *range(60, 68)]
    with OpenEngine(running.grpc) as client:
        stream = subscribe(client, include_snapshot=True)
        next(stream)
        answer(running, longer)
        told = [event.block_stored for event in next(stream).batch.events]
        stream.cancel()

    first = next(one for one in told if one.block_hashes[0].value in keys_of(longer))
    at = keys_of(longer).index(first.block_hashes[0].value)
    assert at > 0
    assert first.parent_block_hash.value == keys_of(longer)[at - 1]


def test_a_start_number_that_is_not_kept_is_one_terminal_error(running: Running) -> None:
    for _ in range(20):
        answer(running, new_prompt())
    with OpenEngine(running.grpc) as client:
        for number in (1, 1_000_000):
            [response] = list(subscribe(client, start_sequence_number=number))
            assert response.error.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT
            assert "start_sequence_number" in response.error.message


def test_a_subscriber_that_reads_too_slowly_gets_what_it_was_sent_and_then_one_terminal_error(tmp_path: Path) -> None:
    cache = {"tokens_per_block": 1, "max_tokens": 4096, "event_buffer_max_size": 2}
    little = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384))
    with worker(tmp_path, make_tiny_model(tmp_path / "model"), kv_cache_config=cache) as slow:
        slow.wait_for("ready")
        with grpc.insecure_channel(slow.grpc, options=little) as channel:
            asked = kv_pb2.SubscribeKvEventsRequest(include_snapshot=True)
            stream = service_pb2_grpc.ControlStub(channel).SubscribeKvEvents(asked, timeout=DEADLINE_S)
            first = next(stream).batch
            for _ in range(12):
                answer(slow, new_prompt(400))
            responses = list(stream)

        *batches, last = responses
        numbers = [one.batch.sequence_number for one in batches]
        assert numbers == list(range(first.sequence_number + 1, first.sequence_number + 1 + len(batches)))
        assert last.error.code == error_pb2.ERROR_CODE_OVERLOADED
        assert last.error.retryable
        assert slow.metric("kinroute_worker_kv_followers_dropped_total", protocol="openengine", why="behind") == 1
        assert slow.metric("kinroute_worker_kv_followers", protocol="openengine") == 0


def test_a_start_number_that_is_kept_needs_no_snapshot(running: Running) -> None:
    with OpenEngine(running.grpc) as client:
        answer(running, new_prompt())
        stream = subscribe(client, include_snapshot=True)
        number = next(stream).batch.sequence_number
        stream.cancel()
        stream = subscribe(client, start_sequence_number=number)
        assert next(stream).batch.sequence_number == number
        stream.cancel()


def test_no_other_data_parallel_rank_is_there(running: Running) -> None:
    with OpenEngine(running.grpc) as client:
        with pytest.raises(grpc.RpcError) as caught:
            list(subscribe(client, data_parallel_ranks=[0, 1]))
        assert status_of(caught)[0] is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            client.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=[1]))
        assert status_of(caught)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert not client.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest()).sources


def test_whoever_is_no_operator_reads_nobodys_prompts(tmp_path: Path) -> None:
    """A worker that others can reach: an unauthenticated subscriber, and an edge without an envelope."""
    keys = tmp_path / "keys.json"
    keys.write_text('{"envelope_keys": [{"id": "k", "secret": "' + "A" * 43 + '="}]}')
    listen = {"grpc": "0.0.0.0:0", "admin": "127.0.0.1:0", "allow_plaintext": True}
    with worker(tmp_path, make_tiny_model(tmp_path / "model"), listen=listen, keys_file=str(keys)) as running:
        running.wait_for("ready")
        address = running.grpc.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - the wildcard, as configured
        with OpenEngine(address) as client:
            for asked in ({"include_snapshot": True}, {"start_sequence_number": 1}, {}):
                with pytest.raises(grpc.RpcError) as caught:
                    list(subscribe(client, **asked))
                assert status_of(caught)[0] is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"), Edge(address) as edge:
            edge.subscribe()


def test_a_worker_that_keeps_no_batches_says_so_and_serves_on(tmp_path: Path) -> None:
    cache = {"tokens_per_block": BLOCK, "max_tokens": 1024, "event_buffer_max_size": 0}
    with worker(tmp_path, make_tiny_model(tmp_path / "model"), kv_cache_config=cache) as running:
        running.wait_for("ready")
        with OpenEngine(running.grpc) as client, pytest.raises(grpc.RpcError) as caught:
            list(subscribe(client, include_snapshot=True))
        assert status_of(caught)[0] is grpc.StatusCode.UNIMPLEMENTED
        with Edge(running.grpc) as edge:
            edge.subscribe()
            handle = edge.submit(new_prompt(), link_pb2.PHASE_AGGREGATED, 2)
            assert edge.events(handle)[-1].HasField("finished")
