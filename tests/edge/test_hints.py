"""A worker is told of lineage in the dialect that it takes; what it does not believe is not the caller's loss."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge.core.life_events import Phase
from edge.core.types import ConversationKey, FamilyKey, Lineage, SamplingOptions, StopOptions, TurnId
from edge.driver import Driver
from edge.hints import LINEAGE, Hints, Takes, Unsent, taken_by
from edge.legs import LegOrder
from edge.signing import EnvelopeSigner
from enginelink.envelope import Key
from enginelink.trtllm_affinity import AUTH_KEY, ID_KEY, Presented
from openengine.v1 import server_pb2, service_pb2_grpc
from tests.edge.fakes import Heard, Protocol, answer_to, fake_worker, linked_driver, make_turn, until

KEY, OTHER = Key("one", b"1" * 32), Key("two", b"2" * 32)
CHILD = Lineage(ConversationKey("child"), FamilyKey("parent"), ConversationKey("parent"), depth=1)


def write_keys(file: Path, *keys: Key) -> Path:
    entries = [{"id": key.key_id, "secret": base64.b64encode(key.secret).decode()} for key in keys]
    file.write_text(json.dumps({"envelope_keys": entries}))
    return file


def order(phase: Phase = Phase.CONTEXT, lineage: Lineage = CHILD, request_id: str = "t-1") -> LegOrder:
    sampling, stops = SamplingOptions(), StopOptions(4)
    return LegOrder(request_id, TurnId("t"), phase, "m", b"\1\0\0\0", sampling, stops, lineage, "acme", "salt")


def make_hints(keys: Sequence[Key] = (KEY,), affinity_key: bytes = b"secret") -> Hints:
    return Hints(EnvelopeSigner("edge", keys), affinity_key)


def unsent(hints: Hints) -> dict[str, float]:
    """By reason, where there were any."""
    (family,) = hints.collect()
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.value}


def info(**extra: Any) -> server_pb2.ServerInfo:
    told = server_pb2.ServerInfo()
    told.extra.update(extra)
    return told


@pytest.mark.parametrize(
    ("said", "takes"),
    [
        ({}, Takes.NOTHING),
        ({"kinroute_lineage": True}, Takes.ENVELOPE),
        ({"kinroute_lineage": False, "trtllm_supports_subagent_affinity": True}, Takes.TRTLLM_HINT),
        ({"kinroute_lineage": True, "trtllm_supports_subagent_affinity": True}, Takes.ENVELOPE),
        ({"trtllm_supports_subagent_affinity": "yes"}, Takes.NOTHING),
    ],
)
def test_what_a_worker_takes_is_what_it_says(said: dict[str, object], takes: Takes) -> None:
    assert taken_by(info(**said)) is takes


def test_an_engine_of_the_other_dialect_gets_its_signed_hint_anew_for_each_attempt() -> None:
    hints = make_hints()
    sent = [hints.metadata(order(request_id=name), "i", Takes.TRTLLM_HINT) for name in ("t-1", "t-2")]

    for metadata, request_id in zip(sent, ("t-1", "t-2"), strict=True):
        assert [key for key, _ in metadata] == [ID_KEY, AUTH_KEY]
        presented = Presented.read(metadata)
        assert presented is not None
        presented.verify([b"secret"], model="m", conversation="child", request_id=request_id)
    assert sent[0] != sent[1]
    assert unsent(hints) == {}


@pytest.mark.parametrize(
    ("leg", "takes", "hints", "reason"),
    [
        (order(), Takes.NOTHING, make_hints(), Unsent.NOT_TAKEN),
        (order(), Takes.ENVELOPE, make_hints(()), Unsent.NO_KEY),
        (order(), Takes.TRTLLM_HINT, make_hints(affinity_key=b""), Unsent.NO_KEY),
        (order(Phase.AGGREGATED), Takes.TRTLLM_HINT, make_hints(), Unsent.NOT_CONTEXT),
    ],
)
def test_a_parent_that_cannot_be_told_is_not_sent_and_counted(
    leg: LegOrder, takes: Takes, hints: Hints, reason: Unsent
) -> None:
    assert hints.metadata(leg, "i", takes) == ()
    assert unsent(hints) == {reason.value: 1}


@pytest.mark.parametrize("takes", list(Takes))
def test_a_generation_leg_and_a_conversation_without_a_parent_are_no_loss(takes: Takes) -> None:
    hints = make_hints()
    root = Lineage(ConversationKey("root"), FamilyKey("root"))

    assert hints.metadata(order(Phase.GENERATION), "i", takes) == ()
    assert [key for key, _ in hints.metadata(order(lineage=root), "i", takes)] == (
        [LINEAGE] if takes is Takes.ENVELOPE else []
    )
    assert unsent(hints) == {}


async def said_of_proofs(address: str) -> tuple[list[str], int]:
    """The parents that a fake worker believed, and how often it refused one."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.ControlStub(channel)
        told: server_pb2.ServerInfo = await stub.GetServerInfo(server_pb2.GetServerInfoRequest())
    return [value.string_value for value in told.extra.fields["fake_parents"].list_value.values], int(
        told.extra.fields["fake_refused"].number_value
    )


async def answered(driver: Driver, name: str = "t") -> None:
    """A child's turn is answered well."""
    turn, heard = make_turn(turn=name, lineage=CHILD), Heard()
    driver.start(turn, heard)
    await heard.wait()
    assert heard.error is None
    assert heard.token_ids == answer_to(turn)


PROTOCOLS = ["enginelink", "openengine"]


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_lineage_that_a_worker_with_other_keys_refuses_is_signed_once_more_and_then_left_out(
    protocol: Protocol, tmp_path: Path
) -> None:
    hints = make_hints()
    with fake_worker("--keys-file", str(write_keys(tmp_path / "keys", OTHER))) as (worker, _):
        async with linked_driver([worker], [worker], protocol=protocol, hints=hints) as driver:
            await answered(driver)
        assert await said_of_proofs(worker) == ([], 2)
    assert unsent(hints) == {Unsent.REFUSED.value: 1}


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_keys_that_are_new_in_the_file_are_read_before_it_is_signed_again(
    protocol: Protocol, tmp_path: Path
) -> None:
    signer = EnvelopeSigner("edge", (OTHER,))

    async def reread() -> None:
        signer.use((KEY,))

    hints = Hints(signer, reread=reread)
    with fake_worker("--keys-file", str(write_keys(tmp_path / "keys", KEY))) as (worker, _):
        async with linked_driver([worker], [worker], protocol=protocol, hints=hints) as driver:
            await answered(driver)
        assert await said_of_proofs(worker) == (["parent"], 1)
    assert unsent(hints) == {}


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_what_was_signed_for_an_earlier_start_of_the_worker_is_signed_for_this_one(
    protocol: Protocol, tmp_path: Path
) -> None:
    hints, keys = make_hints(), str(write_keys(tmp_path / "keys", KEY))
    with fake_worker("--keys-file", keys) as (worker, first):
        async with linked_driver([worker], [worker], protocol=protocol, hints=hints) as driver:
            await answered(driver, "t1")
            (before,) = driver.fleet.workers.values()
            instance = before.instance_id
            first.kill()
            first.wait()
            with fake_worker("--keys-file", keys, listen=worker):
                if protocol == "enginelink":
                    await until(lambda: before.ready and before.instance_id != instance)
                else:
                    # Between two polls: the edge does not know that another one listens there.
                    await _until_listening(worker)
                await answered(driver, "t2")
                parents, _ = await said_of_proofs(worker)
    assert parents == ["parent"]
    assert unsent(hints) == {}


async def _until_listening(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_worker_without_keys_is_sent_no_lineage_and_serves(protocol: Protocol) -> None:
    hints: Any = make_hints()
    with fake_worker() as (worker, _):
        async with linked_driver([worker], [worker], protocol=protocol, hints=hints) as driver:
            await answered(driver)
    assert unsent(hints) == {Unsent.NOT_TAKEN.value: 1}
