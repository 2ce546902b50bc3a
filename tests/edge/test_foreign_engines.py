"""Engines that are none of ours, as workers of an edge: what they say that they can is what is asked of them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from edge.core.errors import Code
from edge.core.types import ConversationKey, FamilyKey, FinishReason, Lineage, Turn, WorkerId
from edge.driver import Driver
from edge.hints import Hints
from edge.signing import EnvelopeSigner
from openengine.v1 import server_pb2
from tests.edge.fakes import Heard, fake_worker, linked_driver, make_turn, until
from tests.foreign_engine import ForeignEngine, answer_of

pytestmark = pytest.mark.anyio
PREFILL, DECODE = server_pb2.ENGINE_ROLE_PREFILL, server_pb2.ENGINE_ROLE_DECODE
CHILD = Lineage(ConversationKey("child"), FamilyKey("parent"), ConversationKey("parent"), depth=1)


@asynccontextmanager
async def fleet_of(
    context: list[ForeignEngine], generation: list[ForeignEngine], **options: Any
) -> AsyncIterator[Driver]:
    """A driver over OpenEngine to these engines; one that stands in both lists does both phases."""
    async with AsyncExitStack() as stack:
        addresses: dict[int, str] = {}
        for engine in (*context, *generation):
            if id(engine) not in addresses:
                addresses[id(engine)] = stack.enter_context(engine.serving())
        lists = [[addresses[id(engine)] for engine in engines] for engines in (context, generation)]
        yield await stack.enter_async_context(linked_driver(*lists, protocol="openengine", **options))


async def asked(driver: Driver, turn: Turn | None = None) -> Heard:
    heard = Heard()
    driver.start(turn or make_turn(), heard)
    await heard.wait()
    return heard


def with_logprobs(count: int = 0) -> Turn:
    turn = make_turn()
    return dataclasses.replace(turn, sampling=dataclasses.replace(turn.sampling, logprobs=count))


async def test_an_engine_alone_answers_what_it_is_asked() -> None:
    engine = ForeignEngine(backend="")
    async with fleet_of([engine], [engine]) as driver:
        heard = await asked(driver)

    assert heard.token_ids == answer_of(3, 8)
    (request,) = engine.requests
    assert request.extra.fields["request_type"].string_value == "context_and_generation"
    assert request.kv.cache_salt == b"salt".hex()


async def test_a_pair_of_them_hands_over_with_the_very_bytes_of_the_reference() -> None:
    prefill, decode = ForeignEngine(role=PREFILL), ForeignEngine(role=DECODE)
    async with fleet_of([prefill], [decode]) as driver:
        heard = await asked(driver)
        assert heard.token_ids == answer_of(3, 8)

    assert len(prefill.given) == 1
    assert decode.got == prefill.given


async def test_a_parent_is_told_only_where_it_is_taken_signed_for_each_request() -> None:
    prefill, decode = ForeignEngine(role=PREFILL, takes_hints=True), ForeignEngine(role=DECODE, takes_hints=True)
    hints = Hints(EnvelopeSigner("edge", ()), b"secret")
    async with fleet_of([prefill], [decode], hints=hints) as driver:
        await asked(driver, make_turn(lineage=CHILD))
        await asked(driver, make_turn(turn="root"))

    told, untold = prefill.metadata
    members = {
        "conversation_id": "child",
        "model": "fake",
        "purpose": "x-trtllm-subagent-affinity-id",
        "request_id": prefill.requests[0].request_id,
        "request_type": "context_only",
        "subagent_affinity_id": "parent",
    }
    signed = hmac.new(b"secret", json.dumps(members, separators=(",", ":")).encode(), hashlib.sha256).hexdigest()
    assert told["x-trtllm-subagent-affinity-id"] == "parent"
    assert told["x-trtllm-subagent-affinity-auth"] == f"sha256={signed}"
    others = [untold, *decode.metadata]
    assert not [key for metadata in others for key in metadata if "affinity" in key or key == "kinroute-lineage"]


async def test_an_engine_that_takes_no_hints_gets_none() -> None:
    engine = ForeignEngine()
    async with fleet_of([engine], [engine], hints=Hints(EnvelopeSigner("edge", ()), b"secret")) as driver:
        await asked(driver, make_turn(lineage=CHILD))

    assert not [key for key in engine.metadata[0] if "affinity" in key]


async def test_engines_whose_connectors_differ_are_never_paired() -> None:
    prefill, decode = ForeignEngine(role=PREFILL, backend="nixl"), ForeignEngine(role=DECODE, backend="mooncake")
    async with fleet_of([prefill], [decode]) as driver:
        heard = await asked(driver)

    assert heard.error is not None
    assert (heard.error.code, heard.error.status) == (Code.OVERLOADED, 503)
    assert "connector" in heard.error.message
    assert prefill.requests == decode.requests == []


async def test_where_the_connectors_do_not_fit_an_engine_that_does_both_phases_serves_alone() -> None:
    prefill, both = ForeignEngine(role=PREFILL, backend="nixl"), ForeignEngine(backend="mooncake")
    async with fleet_of([prefill], [both]) as driver:
        heard = await asked(driver)

    assert heard.token_ids == answer_of(3, 8)
    assert prefill.requests == []


async def test_in_a_mixed_fleet_each_is_paired_with_its_like() -> None:
    """Ours, here fake ones, hand over to each other, and the foreign ones to each other."""
    prefill, decode = ForeignEngine(role=PREFILL), ForeignEngine(role=DECODE)
    with (
        fake_worker() as (context, _),
        fake_worker() as (generation, _),
        prefill.serving() as first,
        decode.serving() as second,
    ):
        async with linked_driver([context, first], [generation, second], protocol="either") as driver:
            pairs = set()
            for number in range(24):
                running = driver.start(make_turn(family=f"f{number}", turn=f"t{number}"), heard := Heard())
                await heard.wait()
                assert heard.error is None
                pairs.add((running.receipt.context_worker, running.receipt.generation_worker))
    assert pairs == {(context, generation), (first, second)}


async def test_an_option_that_no_engine_advertises_is_refused_by_name() -> None:
    engine = ForeignEngine()
    async with fleet_of([engine], [engine]) as driver:
        heard = await asked(driver, with_logprobs())
        bypassing = await asked(driver, dataclasses.replace(make_turn(), bypass_prefix_cache=True))

    assert heard.error is not None
    assert (heard.error.status, heard.error.param) == (400, "logprobs")
    assert bypassing.error is not None
    assert (bypassing.error.status, bypassing.error.param) == (400, "bypass_prefix_cache")
    assert engine.requests == []


async def test_an_option_goes_to_the_engine_that_has_it() -> None:
    without, having = ForeignEngine(), ForeignEngine(logprobs=True)
    async with fleet_of([without, having], [without, having]) as driver:
        for number in range(6):
            turn = dataclasses.replace(with_logprobs(5), lineage=make_turn(family=f"f{number}").lineage)
            assert (await asked(driver, turn)).error is None
        too_many = await asked(driver, with_logprobs(6))

    assert without.requests == []
    assert len(having.requests) == 6
    assert too_many.error is not None
    assert too_many.error.param == "logprobs"


async def test_an_engine_that_keeps_no_caches_apart_leaves_its_own_alone() -> None:
    engine = ForeignEngine(salts=False, bypasses=True)
    async with fleet_of([engine], [engine]) as driver:
        await asked(driver)

    assert engine.requests[0].kv.bypass_prefix_cache
    assert not engine.requests[0].kv.HasField("cache_salt")


@pytest.mark.parametrize(
    "said",
    [
        {"revision": 0},
        {"revision": 2},
        {"minimum_revision": 0},
        {"minimum_revision": 2},
        {"health": 4},
        {"health": 5},
        {"health": 77},
        {"salts": False},
        {"role": PREFILL},
        {"role": DECODE},
    ],
    ids=lambda said: str(said),
)
async def test_what_an_engine_says_that_this_edge_does_not_know_keeps_it_out(said: dict[str, Any]) -> None:
    """A role that is not both phases', too: it stands in both lists here."""
    known, unknown = ForeignEngine(), ForeignEngine(**said)
    with known.serving() as first, unknown.serving() as second:
        both = [first, second]
        async with linked_driver(both, both, protocol="openengine", wait=False) as driver:
            await until(lambda: driver.fleet.workers[WorkerId(first)].ready)
            await asyncio.sleep(0.1)
            assert not driver.fleet.workers[WorkerId(second)].ready
            assert (await asked(driver)).error is None
    assert unknown.requests == []


@pytest.mark.parametrize("release", ["", "0123abcd"])
async def test_an_older_peer_serves_and_its_numbers_that_we_do_not_share_are_none(release: str) -> None:
    engine = ForeignEngine(release=release, role=9, reason=17)
    async with fleet_of([engine], [engine]) as driver:
        heard = await asked(driver)
        assert (heard.token_ids, heard.reason) == (answer_of(3, 8), FinishReason.STOP)
        for code in (11, 12, 99):
            engine.error_code = code
            failed = await asked(driver)
            assert failed.error is not None
            assert (failed.error.code, failed.error.message) == (Code.WORKER_FAILED, "A worker failed.")


@pytest.mark.parametrize(
    "odd", [{"attributes": {"x": float("nan")}}, {"attributes": {"x": {"y": [2.0**54]}}}, {"port": 0}], ids=str
)
async def test_a_reference_that_cannot_be_carried_on_unchanged_fails_the_leg(odd: dict[str, Any]) -> None:
    prefill, decode = ForeignEngine(role=PREFILL, **odd), ForeignEngine(role=DECODE)
    async with fleet_of([prefill], [decode]) as driver:
        heard = await asked(driver)

    assert heard.error is not None
    assert heard.error.code is Code.WORKER_FAILED
    assert decode.requests == []


async def test_an_answer_goes_on_at_another_engine_when_the_first_vanishes() -> None:
    engines = [ForeignEngine(step_s=0.02), ForeignEngine(step_s=0.02)]
    async with fleet_of(engines, engines) as driver:
        turn, heard = make_turn(max_tokens=20), Heard()
        driver.start(turn, heard)
        await asyncio.wait_for(heard.first.wait(), 20)
        served = next(engine for engine in engines if engine.requests)
        await asyncio.to_thread(served.vanish)
        await heard.wait()

        assert heard.error is None
        assert heard.token_ids == answer_of(3, 20)
        assert all(engine.requests for engine in engines)
