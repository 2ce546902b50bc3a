"""What only EngineLink can do, and get wrong."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import grpc
import pytest

from bench.fake_engine import FakeEngine, Link, Options
from bench.fake_openengine import FakeControl
from bench.fake_worker import FakeLink
from edge.core.fleet import Fleet
from edge.core.life_events import Phase
from edge.core.types import WorkerId
from edge.legs import order_of
from edge.worker_link import MAX_HANDLE, WorkerLink
from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import service_pb2_grpc
from tests.edge.fakes import Heard, Protocol, answer_to, connection, fake_worker, linked_driver, make_turn, until

pytestmark = pytest.mark.anyio


async def test_a_worker_whose_columns_do_not_match_loses_its_link_and_the_edge_goes_on() -> None:
    with fake_worker("--fault", "garble", "--fault-after", "1") as (worker, _):
        async with linked_driver([worker], [worker]) as driver:
            well, badly = Heard(), Heard()
            driver.start(make_turn(), well)
            await well.wait()
            driver.start(make_turn(), badly)
            await badly.wait()
            assert badly.error is not None
            assert badly.error.retryable
            await until(lambda: driver.model_ready)


@pytest.mark.parametrize("protocol", ["enginelink", "either"])
async def test_a_worker_that_speaks_enginelink_is_linked(protocol: Protocol) -> None:
    with fake_worker() as (worker, _):
        async with linked_driver([worker], [worker], protocol=protocol) as driver:
            turn, heard = make_turn(), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)


async def test_a_submit_carries_the_tag_of_its_tenant() -> None:
    submits: list[link_pb2.Submit] = []

    class Engine(FakeEngine):
        def submit(self, link: Link, submit: link_pb2.Submit) -> None:
            submits.append(submit)

    engine, server = Engine(Options()), grpc.aio.server()
    link_pb2_grpc.add_EngineLinkServicer_to_server(FakeLink(engine), server)
    service_pb2_grpc.add_ControlServicer_to_server(FakeControl(engine), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    fleet = Fleet([address], [address])
    link = connection(address, "enginelink", fleet)
    linking = asyncio.create_task(link.run())
    try:
        await until(lambda: fleet.can_serve)
        turn = dataclasses.replace(make_turn(), tenant_tag=b"tag")
        link.submit(order_of(turn, 1, Phase.AGGREGATED), cast(Any, None))
        await until(lambda: bool(submits))
    finally:
        linking.cancel()
        await server.stop(None)

    assert submits[0].tenant_tag == b"tag"


async def test_a_worker_without_enginelink_is_spoken_to_in_openengine() -> None:
    with fake_worker("--no-enginelink") as (context, _), fake_worker() as (generation, _):
        async with linked_driver([context], [generation], protocol="either") as driver:
            turn, heard = make_turn(), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)


async def test_handles_begin_again_where_the_wire_can_count_no_further_and_pass_over_live_ones() -> None:
    with fake_worker() as (worker, _):
        async with linked_driver([worker], [worker]) as driver:
            link = driver.connections[WorkerId(worker)]
            assert isinstance(link, WorkerLink)
            turns = [make_turn(max_tokens=50, turn=f"t{number}", prompt=(number,)) for number in range(4)]
            sinks = [Heard() for _ in turns]
            driver.start(turns[0], sinks[0])  # has handle 1
            await asyncio.wait_for(sinks[0].first.wait(), 20)
            link._last_handle = MAX_HANDLE - 1
            for turn, heard in zip(turns[1:], sinks[1:], strict=True):
                driver.start(turn, heard)
            for turn, heard in zip(turns, sinks, strict=True):
                await heard.wait()
                assert heard.token_ids == answer_to(turn)
            assert link._last_handle == 3


async def test_a_lost_link_fails_all_its_legs_in_one_moment() -> None:
    with fake_worker() as (worker, process):
        async with linked_driver([worker], [worker]) as driver:
            sinks = [Heard() for _ in range(8)]
            for number, heard in enumerate(sinks):
                driver.start(make_turn(max_tokens=100_000, turn=f"t{number}"), heard)
            for heard in sinks:
                await asyncio.wait_for(heard.first.wait(), 20)
            process.kill()
            await asyncio.wait([asyncio.create_task(heard.wait()) for heard in sinks], return_when="FIRST_COMPLETED")
            assert all(heard.error is not None for heard in sinks)
