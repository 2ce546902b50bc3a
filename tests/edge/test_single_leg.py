"""A leg alone, over a real link to a fake worker: what ends it, and what it leaves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from edge.core.errors import Code
from edge.core.lifecycle import Deadlines
from edge.core.types import FinishReason
from edge.driver import Driver
from edge.single_leg import Prefill, SingleLeg
from tests.edge.fakes import Heard, fake_worker, linked_driver, make_turn, until, until_idle

pytestmark = pytest.mark.anyio


@dataclass
class HeardLeg(Heard):
    prefill: Prefill | None = None

    def prefilled(self, prefill: Prefill) -> None:
        assert not self.over.is_set(), "a second end"
        self.prefill = prefill
        self.over.set()


async def prefilled(driver: Driver, pin_life_s: float = 60.0) -> Prefill:
    heard = HeardLeg()
    SingleLeg.context(driver, make_turn(), heard, pin_life_s=pin_life_s)
    await heard.wait()
    assert heard.prefill is not None
    return heard.prefill


def generation(driver: Driver, prefill: Prefill, heard: HeardLeg, max_tokens: int = 8) -> SingleLeg:
    turn = make_turn(max_tokens=max_tokens)
    return SingleLeg.generation(driver, turn, heard, kv_session=prefill.kv_session, pulled_from=prefill.pin[0])


async def test_two_legs_make_an_answer_and_leave_nothing() -> None:
    with fake_worker() as (context, _), fake_worker() as (other, _):
        async with linked_driver([context], [other]) as driver:
            prefill = await prefilled(driver)
            heard = HeardLeg()
            leg = generation(driver, prefill, heard)
            await heard.wait()

            assert (heard.reason, len(heard.token_ids)) == (FinishReason.LENGTH, 8)
            assert heard.usage is not None
            assert heard.usage.completion_tokens == 8
            assert leg.receipt.generation_worker == other
            assert not driver.running
            await until_idle(context)
            await until_idle(other)


async def test_pages_that_nobody_fetches_are_let_go() -> None:
    with fake_worker() as (address, _):
        async with linked_driver([address], [address]) as driver:
            await prefilled(driver, pin_life_s=0.0)
            await until(lambda: not len(driver.pins))
            await until_idle(address)


async def test_a_worker_that_is_silent_for_too_long_fails_the_leg() -> None:
    with fake_worker("--step-ms", "10000") as (address, _):
        async with linked_driver([address], [address], deadlines=Deadlines(queue_s=0.2)) as driver:
            heard = HeardLeg()
            SingleLeg.context(driver, make_turn(), heard, pin_life_s=60.0)
            await heard.wait()

            assert heard.error is not None
            assert (heard.error.code, heard.error.retryable) == (Code.TIMED_OUT, True)
            assert not driver.running


async def test_without_a_worker_it_fails_and_may_come_again() -> None:
    async with linked_driver(["127.0.0.1:9"], ["127.0.0.1:9"], wait=False) as driver:
        heard = HeardLeg()
        SingleLeg.context(driver, make_turn(), heard, pin_life_s=60.0)
        await heard.wait()

        assert heard.error is not None
        assert (heard.error.code, heard.error.retryable) == (Code.OVERLOADED, True)
        assert not driver.running


async def test_a_leg_that_is_cancelled_before_it_began_is_never_sent() -> None:
    with fake_worker() as (address, _):
        async with linked_driver([address], [address]) as driver:
            heard = HeardLeg()
            SingleLeg.context(driver, make_turn(), heard, pin_life_s=60.0).cancel()
            await asyncio.sleep(0.05)

            assert not heard.over.is_set()
            assert not driver.running
            await until_idle(address)


async def test_a_worker_that_dies_fails_the_leg_and_leaves_nothing() -> None:
    with fake_worker("--step-ms", "20") as (address, process):
        async with linked_driver([address], [address]) as driver:
            prefill = await prefilled(driver)
            heard = HeardLeg()
            generation(driver, prefill, heard, max_tokens=1000)
            await heard.first.wait()
            process.kill()
            await heard.wait()

            assert heard.error is not None
            assert (heard.error.code, heard.error.retryable) == (Code.WORKER_FAILED, True)
            assert not driver.running
            assert not len(driver.pins)
