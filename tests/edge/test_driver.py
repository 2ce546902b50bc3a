"""Turns against fake workers: real processes, real sockets, real deaths."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from edge.core.errors import Code
from edge.core.lifecycle import Deadlines
from edge.core.types import FinishReason, Usage, WorkerId
from edge.driver import Driver
from tests.edge.fakes import Heard, answer_to, fake_worker, linked_driver, make_turn

pytestmark = pytest.mark.anyio


def assert_idle(driver: Driver) -> None:
    assert not driver.running
    assert all(worker.in_flight == 0 for worker in driver.fleet.workers.values())


def instance_of(driver: Driver, address: str) -> str:
    """Of the worker there, while it is ready."""
    worker = driver.fleet.workers[WorkerId(address)]
    return worker.instance_id if worker.ready else ""


def family_whose_favourite_is(driver: Driver, context: str, generation: str) -> str:
    for number in itertools.count():
        placement = driver.router.place(make_turn(family=f"f{number}").lineage, 3)
        if (placement.context, placement.generation) == (context, generation):
            return f"f{number}"
    raise AssertionError


async def test_an_answer_is_prefilled_on_one_worker_and_decoded_on_the_other() -> None:
    with fake_worker() as (context, _), fake_worker() as (generation, _):
        async with linked_driver([context], [generation]) as driver:
            turn, heard = make_turn(), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert (heard.reason, heard.usage) == (FinishReason.LENGTH, Usage(3, 0, 8))
            assert (running.receipt.context_worker, running.receipt.generation_worker) == (context, generation)
            assert running.receipt.attempts == 1
            assert_idle(driver)


async def test_a_worker_that_stands_in_both_lists_serves_alone() -> None:
    with fake_worker() as (worker, _):
        async with linked_driver([worker], [worker]) as driver:
            turn, heard = make_turn(), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)


async def test_an_answer_of_one_token_needs_no_generation_worker() -> None:
    with fake_worker() as (context, _), fake_worker("--fault", "refuse") as (generation, _):
        async with linked_driver([context], [generation]) as driver:
            turn, heard = make_turn(max_tokens=1), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert_idle(driver)


@pytest.mark.parametrize("fault", ["die-before-started", "die-after-started", "fail-retryable"])
async def test_a_context_leg_that_fails_before_its_first_token_is_tried_on_another_worker(fault: str) -> None:
    slow = ("--prefill-steps", "60")
    with (
        fake_worker("--fault", fault, *slow) as (bad, _),
        fake_worker() as (good, _),
        fake_worker() as (generation, _),
    ):
        async with linked_driver([bad, good], [generation]) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, bad, generation)), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert running.receipt.attempts == 2
            assert running.receipt.context_worker == good
            assert_idle(driver)


async def test_a_generation_leg_that_dies_in_its_pull_is_tried_elsewhere_with_the_same_pages() -> None:
    with fake_worker() as (context, _), fake_worker("--fault", "die-in-pull") as (bad, _), fake_worker() as (good, _):
        async with linked_driver([context], [bad, good]) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, context, bad)), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert running.receipt.generation_worker == good


async def test_a_context_worker_that_dies_with_its_pages_is_replaced() -> None:
    with (
        fake_worker("--fault", "die-after-prefill") as (bad, _),
        fake_worker() as (good, _),
        fake_worker("--pull-steps", "60") as (generation, _),
    ):
        async with linked_driver([bad, good], [generation]) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, bad, generation)), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn), "the pull of a fake worker succeeds without its source"
            assert_idle(driver)


@pytest.mark.parametrize("fault", ["die-after-first-token", "die-mid-decode"])
async def test_an_answer_goes_on_from_the_tokens_already_sent_when_its_worker_dies(fault: str) -> None:
    with fake_worker() as (context, _), fake_worker("--fault", fault) as (bad, _), fake_worker() as (good, _):
        async with linked_driver([context], [bad, good]) as driver:
            turn, heard = make_turn(max_tokens=20, family=family_whose_favourite_is(driver, context, bad)), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert heard.usage == Usage(3, 0, 20)
            assert running.receipt.generation_worker == good
            assert_idle(driver)


async def test_a_refusal_that_is_the_callers_fault_is_not_tried_again() -> None:
    with fake_worker("--fault", "refuse") as (bad, _), fake_worker() as (good, _), fake_worker() as (generation, _):
        async with linked_driver([bad, good], [generation]) as driver:
            heard = Heard()
            running = driver.start(make_turn(family=family_whose_favourite_is(driver, bad, generation)), heard)
            await heard.wait()
            assert heard.error is not None
            assert heard.error.code is Code.INVALID
            assert running.receipt.attempts == 1


async def test_without_a_second_worker_a_death_is_a_retryable_error_and_not_a_hang() -> None:
    with fake_worker("--fault", "die-before-started") as (context, _), fake_worker() as (generation, _):
        async with linked_driver([context], [generation]) as driver:
            heard = Heard()
            driver.start(make_turn(), heard)
            await heard.wait()
            assert heard.error is not None
            assert heard.error.retryable
            assert_idle(driver)


async def test_a_silent_worker_is_given_up_at_its_deadline() -> None:
    with fake_worker("--fault", "silent") as (bad, _), fake_worker() as (good, _), fake_worker() as (generation, _):
        async with linked_driver([bad, good], [generation], deadlines=Deadlines(queue_s=0.5)) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, bad, generation)), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)


async def test_cancel_reaches_the_worker_and_tells_nothing_more() -> None:
    with fake_worker() as (context, _), fake_worker() as (generation, _):
        async with linked_driver([context], [generation]) as driver:
            heard = Heard()
            running = driver.start(make_turn(max_tokens=100_000), heard)
            await asyncio.wait_for(heard.first.wait(), 20)
            running.cancel()
            told = len(heard.token_ids)
            await asyncio.sleep(0.2)
            assert len(heard.token_ids) == told
            assert not heard.over.is_set()
            assert_idle(driver)
            # Its next report says that the worker has nothing to do: the leg ended there too.
            other = Heard()
            driver.start(make_turn(max_tokens=2, turn="u"), other)
            await other.wait()
            await asyncio.sleep(0.1)
            assert driver.fleet.workers[WorkerId(running.receipt.generation_worker)].others == 0


async def test_stop_ends_the_answer_with_its_reason_and_usage() -> None:
    with fake_worker() as (worker, _):
        async with linked_driver([worker], [worker]) as driver:
            heard = Heard()
            running = driver.start(make_turn(max_tokens=100_000), heard)
            await asyncio.wait_for(heard.first.wait(), 20)
            running.stop(FinishReason.TOOL_CALLS)
            assert heard.reason is FinishReason.TOOL_CALLS
            assert heard.usage is not None
            assert heard.usage.completion_tokens == len(heard.token_ids)
            assert_idle(driver)


async def test_a_lost_link_fails_its_legs_at_once_and_the_worker_comes_back() -> None:
    with fake_worker() as (address, process):
        async with linked_driver([address], [address]) as driver:
            heard = Heard()
            driver.start(make_turn(max_tokens=100_000), heard)
            await asyncio.wait_for(heard.first.wait(), 20)
            before = instance_of(driver, address)
            process.kill()
            await heard.wait()
            assert heard.error is not None
            assert instance_of(driver, address) == ""
            with fake_worker(listen=address):
                async with asyncio.timeout(20):
                    while instance_of(driver, address) in ("", before):
                        await asyncio.sleep(0.01)
                again = Heard()
                driver.start(make_turn(), again)
                await again.wait()
                assert again.reason is FinishReason.LENGTH


async def test_with_no_worker_ready_a_turn_is_refused_as_overload() -> None:
    async with linked_driver(["127.0.0.1:1"], ["127.0.0.1:1"], wait=False) as driver:
        heard = Heard()
        driver.start(make_turn(), heard)
        await heard.wait()
        assert heard.error is not None
        assert (heard.error.code, heard.error.retryable) == (Code.OVERLOADED, True)


async def test_two_edges_share_one_worker() -> None:
    with fake_worker() as (worker, _):
        async with linked_driver([worker], [worker]) as one, linked_driver([worker], [worker]) as other:
            turns = [make_turn(prompt=(number,), turn=f"t{number}") for number in range(8)]
            sinks = [Heard() for _ in turns]
            for number, (turn, heard) in enumerate(zip(turns, sinks, strict=True)):
                (one if number % 2 else other).start(turn, heard)
            for turn, heard in zip(turns, sinks, strict=True):
                await heard.wait()
                assert heard.token_ids == answer_to(turn)
