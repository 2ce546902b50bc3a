"""What only EngineLink can do, and get wrong."""

from __future__ import annotations

import asyncio

import pytest

from edge.core.types import WorkerId
from edge.worker_link import MAX_HANDLE, WorkerLink
from tests.edge.fakes import Heard, Protocol, answer_to, fake_worker, linked_driver, make_turn, until

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
