"""Turns against fake workers: real processes, real sockets, real deaths."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeAlias

import pytest

from edge.core.errors import Code
from edge.core.lifecycle import Deadlines
from edge.core.types import FinishReason, Usage, WorkerId
from edge.driver import Driver
from tests.edge.fakes import Heard, answer_to, fake_worker, linked_driver, make_turn, until, until_idle

pytestmark = pytest.mark.anyio
Linked: TypeAlias = Callable[..., AbstractAsyncContextManager[Driver]]


@pytest.fixture(params=["enginelink", "openengine"])
def linked(request: pytest.FixtureRequest) -> Linked:
    """A driver that is connected over the one protocol, then over the other."""
    return partial(linked_driver, protocol=request.param)


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


async def test_an_answer_is_prefilled_on_one_worker_and_decoded_on_the_other(linked: Linked) -> None:
    with fake_worker() as (context, _), fake_worker() as (generation, _):
        async with linked([context], [generation]) as driver:
            turn, heard = make_turn(), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert (heard.reason, heard.usage) == (FinishReason.LENGTH, Usage(3, 0, 8))
            assert (running.receipt.context_worker, running.receipt.generation_worker) == (context, generation)
            assert running.receipt.attempts == 1
            assert_idle(driver)


async def test_a_worker_that_stands_in_both_lists_serves_alone(linked: Linked) -> None:
    with fake_worker() as (worker, _):
        async with linked([worker], [worker]) as driver:
            turn, heard = make_turn(), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)


async def test_an_answer_of_one_token_needs_no_generation_worker(linked: Linked) -> None:
    with fake_worker() as (context, _), fake_worker("--fault", "refuse") as (generation, _):
        async with linked([context], [generation]) as driver:
            turn, heard = make_turn(max_tokens=1), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert_idle(driver)


@pytest.mark.parametrize("fault", ["die-before-started", "die-after-started", "fail-retryable"])
async def test_a_context_leg_that_fails_before_its_first_token_is_tried_on_another_worker(
    linked: Linked, fault: str
) -> None:
    slow = ("--prefill-steps", "60")
    with (
        fake_worker("--fault", fault, *slow) as (bad, _),
        fake_worker() as (good, _),
        fake_worker() as (generation, _),
    ):
        async with linked([bad, good], [generation]) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, bad, generation)), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert running.receipt.attempts == 2
            assert running.receipt.context_worker == good
            assert_idle(driver)


async def test_a_generation_leg_that_dies_in_its_pull_is_tried_elsewhere_with_the_same_pages(linked: Linked) -> None:
    with fake_worker() as (context, _), fake_worker("--fault", "die-in-pull") as (bad, _), fake_worker() as (good, _):
        async with linked([context], [bad, good]) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, context, bad)), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert running.receipt.generation_worker == good


async def test_a_generation_worker_that_died_while_the_prompt_was_prefilled_is_replaced(linked: Linked) -> None:
    with (
        fake_worker("--prefill-steps", "100") as (context, _),
        fake_worker() as (gone, process),
        fake_worker() as (good, _),
    ):
        async with linked([context], [gone, good]) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, context, gone)), Heard()
            running = driver.start(turn, heard)
            await asyncio.sleep(0)
            process.kill()
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert running.receipt.generation_worker == good
            assert running.receipt.context_worker == context


async def test_a_context_worker_that_dies_with_its_pages_is_replaced(linked: Linked) -> None:
    with (
        fake_worker("--fault", "die-after-prefill") as (bad, _),
        fake_worker() as (good, _),
        fake_worker("--pull-steps", "60") as (generation, _),
    ):
        async with linked([bad, good], [generation]) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, bad, generation)), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn), "the pull of a fake worker succeeds without its source"
            assert_idle(driver)


@pytest.mark.parametrize("fault", ["die-after-first-token", "die-mid-decode"])
async def test_an_answer_goes_on_from_the_tokens_already_sent_when_its_worker_dies(linked: Linked, fault: str) -> None:
    with fake_worker() as (context, _), fake_worker("--fault", fault) as (bad, _), fake_worker() as (good, _):
        async with linked([context], [bad, good]) as driver:
            turn, heard = make_turn(max_tokens=20, family=family_whose_favourite_is(driver, context, bad)), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert heard.usage == Usage(3, 0, 20)
            assert running.receipt.generation_worker == good
            assert_idle(driver)


async def test_a_refusal_that_is_the_callers_fault_is_not_tried_again(linked: Linked) -> None:
    with fake_worker("--fault", "refuse") as (bad, _), fake_worker() as (good, _), fake_worker() as (generation, _):
        async with linked([bad, good], [generation]) as driver:
            heard = Heard()
            running = driver.start(make_turn(family=family_whose_favourite_is(driver, bad, generation)), heard)
            await heard.wait()
            assert heard.error is not None
            assert heard.error.code is Code.INVALID
            assert running.receipt.attempts == 1


async def test_without_a_second_worker_a_death_is_a_retryable_error_and_not_a_hang(linked: Linked) -> None:
    with fake_worker("--fault", "die-before-started") as (context, _), fake_worker() as (generation, _):
        async with linked([context], [generation]) as driver:
            heard = Heard()
            driver.start(make_turn(), heard)
            await heard.wait()
            assert heard.error is not None
            assert heard.error.retryable
            assert_idle(driver)


async def test_a_silent_worker_is_given_up_at_its_deadline(linked: Linked) -> None:
    with fake_worker("--fault", "silent") as (bad, _), fake_worker() as (good, _), fake_worker() as (generation, _):
        async with linked([bad, good], [generation], deadlines=Deadlines(queue_s=0.5)) as driver:
            turn, heard = make_turn(family=family_whose_favourite_is(driver, bad, generation)), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)


@pytest.mark.parametrize("pull_steps", [1, 10_000], ids=["while it decodes", "while it pulls"])
async def test_cancel_ends_both_legs_and_tells_nothing_more(linked: Linked, pull_steps: int) -> None:
    with fake_worker() as (context, _), fake_worker("--pull-steps", str(pull_steps)) as (generation, _):
        async with linked([context], [generation]) as driver:
            heard = Heard()
            running = driver.start(make_turn(max_tokens=100_000), heard)
            await asyncio.wait_for(heard.first.wait(), 20)
            running.cancel()
            told = len(heard.token_ids)
            assert_idle(driver)
            await until_idle(context)
            await until_idle(generation)
            assert len(heard.token_ids) == told
            assert not heard.over.is_set()


async def test_an_answer_that_is_over_leaves_nothing_on_its_workers(linked: Linked) -> None:
    with fake_worker() as (context, _), fake_worker() as (generation, _):
        async with linked([context], [generation]) as driver:
            heard = Heard()
            driver.start(make_turn(), heard)
            await heard.wait()
            await until_idle(context)
            await until_idle(generation)


async def test_cached_tokens_are_those_of_the_first_prefill(linked: Linked) -> None:
    with (
        fake_worker("--cached-tokens", "2") as (context, _),
        fake_worker("--cached-tokens", "3", "--fault", "die-mid-decode") as (bad, _),
        fake_worker("--cached-tokens", "3") as (good, _),
    ):
        async with linked([context], [bad, good]) as driver:
            heard = Heard()
            driver.start(make_turn(max_tokens=20, family=family_whose_favourite_is(driver, context, bad)), heard)
            await heard.wait()
            assert heard.usage == Usage(3, 2, 20)


async def test_cached_tokens_of_a_worker_that_serves_alone_are_told(linked: Linked) -> None:
    with fake_worker("--cached-tokens", "2") as (worker, _):
        async with linked([worker], [worker]) as driver:
            heard = Heard()
            driver.start(make_turn(), heard)
            await heard.wait()
            assert heard.usage == Usage(3, 2, 8)


async def test_an_answer_goes_on_elsewhere_when_its_worker_falls_silent_in_the_middle(linked: Linked) -> None:
    with (
        fake_worker() as (context, _),
        fake_worker("--fault", "stall-mid-decode") as (bad, _),
        fake_worker() as (good, _),
    ):
        async with linked([context], [bad, good], deadlines=Deadlines(token_s=0.5)) as driver:
            turn, heard = make_turn(max_tokens=20, family=family_whose_favourite_is(driver, context, bad)), Heard()
            driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            await until_idle(bad)


async def test_a_slow_worker_is_waited_for_as_long_as_each_token_is_in_time(linked: Linked) -> None:
    """The whole takes far longer than the deadline, no part of it does."""
    with fake_worker("--step-ms", "150") as (worker, _):
        async with linked([worker], [worker], deadlines=Deadlines(queue_s=1.0, move_s=1.0, token_s=1.0)) as driver:
            turn, heard = make_turn(max_tokens=12), Heard()
            running = driver.start(turn, heard)
            await heard.wait()
            assert heard.token_ids == answer_to(turn)
            assert running.receipt.attempts == 1


async def test_stop_ends_the_answer_with_its_reason_and_usage(linked: Linked) -> None:
    with fake_worker() as (worker, _):
        async with linked([worker], [worker]) as driver:
            heard = Heard()
            running = driver.start(make_turn(max_tokens=100_000), heard)
            await asyncio.wait_for(heard.first.wait(), 20)
            running.stop(FinishReason.TOOL_CALLS)
            assert heard.reason is FinishReason.TOOL_CALLS
            assert heard.usage is not None
            assert heard.usage.completion_tokens == len(heard.token_ids)
            assert_idle(driver)


async def test_a_lost_worker_fails_all_its_legs_at_once_and_is_known_again_when_it_comes_back(linked: Linked) -> None:
    with fake_worker() as (address, process):
        async with linked([address], [address]) as driver:
            sinks = [Heard() for _ in range(8)]
            for number, heard in enumerate(sinks):
                driver.start(make_turn(max_tokens=100_000, turn=f"t{number}"), heard)
            for heard in sinks:
                await asyncio.wait_for(heard.first.wait(), 20)
            before = instance_of(driver, address)
            process.kill()
            for heard in sinks:
                await heard.wait()
                assert heard.error is not None
                assert heard.error.retryable
            assert instance_of(driver, address) == ""
            assert_idle(driver)
            with fake_worker(listen=address):
                await until(lambda: instance_of(driver, address) not in {"", before})
                again = Heard()
                driver.start(make_turn(), again)
                await again.wait()
                assert again.reason is FinishReason.LENGTH


async def test_with_no_worker_ready_a_turn_is_refused_as_overload(linked: Linked) -> None:
    async with linked(["127.0.0.1:1"], ["127.0.0.1:1"], wait=False) as driver:
        heard = Heard()
        driver.start(make_turn(), heard)
        await heard.wait()
        assert heard.error is not None
        assert (heard.error.code, heard.error.retryable) == (Code.OVERLOADED, True)


async def test_two_edges_share_one_worker(linked: Linked) -> None:
    with fake_worker() as (worker, _):
        async with linked([worker], [worker]) as one, linked([worker], [worker]) as other:
            turns = [make_turn(prompt=(number,), turn=f"t{number}") for number in range(8)]
            sinks = [Heard() for _ in turns]
            for number, (turn, heard) in enumerate(zip(turns, sinks, strict=True)):
                (one if number % 2 else other).start(turn, heard)
            for turn, heard in zip(turns, sinks, strict=True):
                await heard.wait()
                assert heard.token_ids == answer_to(turn)
