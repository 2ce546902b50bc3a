"""Tenants take turns at rank 0, whoever floods."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.worker.core.engines import TestEngine, make_engine
from worker.core import waiting
from worker.core.outputs import Finished, Rejection, Started
from worker.core.types import Phase, RequestKey

FLOODER, QUIET, OTHER = b"flooder", b"quiet", b"other"


def prompt(key: int, length: int) -> list[int]:
    """One that shares no block with another's."""
    return [key, *range(length - 1)]


def began(engine: TestEngine) -> list[int]:
    """Runs to the end; who began, in order."""
    return [one.key for one in engine.run() if isinstance(one, Started)]


def test_a_tenant_that_comes_late_is_next_however_many_another_has_waiting() -> None:
    engine = make_engine(max_batch_size=1, num_pages=32)
    for key in range(1, 9):
        engine.submit(key, prompt(key, 6), tenant=FLOODER)
    engine.step()
    engine.submit(9, prompt(9, 6), tenant=QUIET)

    assert began(engine)[:2] == [9, 2]


def test_turns_are_weighted_by_the_tokens_that_had_to_be_computed() -> None:
    engine = make_engine(max_batch_size=1, num_pages=64)
    for key in range(1, 5):
        engine.submit(key, prompt(key, 12), tenant=FLOODER)
    for key in range(5, 14):
        engine.submit(key, prompt(key, 4), tenant=QUIET)

    assert began(engine)[:8] == [1, 5, 6, 7, 2, 8, 9, 10]


def test_what_is_cached_costs_no_turn() -> None:
    engine = make_engine(max_batch_size=1, num_pages=64)
    long = prompt(1, 40)
    engine.submit(1, long, tenant=QUIET)
    engine.run()
    for key in range(2, 5):
        engine.submit(key, [*long, key, key], tenant=QUIET)
        engine.submit(10 + key, prompt(10 + key, 4), tenant=OTHER)

    order = began(engine)

    assert [key > 10 for key in order] == [False, True] * 3


def test_long_answers_cost_turns_as_prompts_do() -> None:
    engine = make_engine(max_batch_size=1, num_pages=64)
    for key in range(1, 4):
        engine.submit(key, prompt(key, 2), max_tokens=30, tenant=FLOODER)
    for key in range(4, 9):
        engine.submit(key, prompt(key, 9), tenant=QUIET)

    assert began(engine) == [1, 4, 5, 6, 7, 2, 8, 3]


def test_a_tenants_own_requests_begin_in_their_order() -> None:
    engine = make_engine(max_batch_size=2, num_pages=64)
    lengths = [9, 2, 14, 3, 3, 8]
    for key, length in enumerate(lengths, 1):
        engine.submit(key, prompt(key, length), tenant=FLOODER)
        engine.submit(key + 10, prompt(key + 10, 5), tenant=QUIET)

    order = began(engine)

    assert [key for key in order if key < 10] == [1, 2, 3, 4, 5, 6]
    assert [key for key in order if key > 10] == [11, 12, 13, 14, 15, 16]


def test_one_tenants_long_prompt_does_not_hold_up_the_chunks_of_anothers() -> None:
    engine = make_engine(num_pages=200, max_num_tokens=8)
    engine.submit(1, prompt(1, 300), tenant=FLOODER)
    engine.step()
    engine.submit(2, prompt(2, 7), tenant=QUIET)

    steps = 0
    while Finished not in {type(one) for one in engine.step() or []}:
        steps += 1

    assert steps == 1, "four of its tokens in each of two steps"
    assert max(len(work.batch.token_ids) for work in engine.works if work.batch is not None) == 8


def test_who_has_had_its_part_of_a_step_lets_another_begin_though_it_came_first() -> None:
    engine = make_engine(num_pages=400, max_num_tokens=8)
    engine.submit(1, prompt(1, 300), tenant=FLOODER)
    engine.step()
    engine.submit(2, prompt(2, 300), tenant=FLOODER)
    engine.submit(3, prompt(3, 4), tenant=QUIET)

    assert Started(RequestKey(3), 0) in (engine.step() or [])


def test_long_answers_of_one_tenant_do_not_take_every_place_while_there_are_others() -> None:
    engine = make_engine(num_pages=400, max_batch_size=10)
    engine.submit(1, prompt(1, 2), tenant=QUIET)
    for key in range(2, 30):
        engine.submit(key, prompt(key, 2), max_tokens=20, tenant=FLOODER)
    engine.run_some(3)
    assert engine.scheduler.load.running == 8
    engine.submit(40, prompt(40, 2), tenant=QUIET)

    assert Started(RequestKey(40), 0) in (engine.step() or [])


def test_a_tenant_that_is_alone_has_every_place() -> None:
    engine = make_engine(num_pages=400, max_batch_size=10)
    for key in range(1, 30):
        engine.submit(key, prompt(key, 2), max_tokens=20, tenant=FLOODER)
    engine.run_some(3)

    assert engine.scheduler.load.running == 10


def test_places_are_kept_for_others_as_long_as_they_came_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MIXED_PLANS", 20)
    engine = make_engine(num_pages=400, max_batch_size=10)
    engine.submit(1, prompt(1, 2), tenant=QUIET)
    engine.submit(2, prompt(2, 2), tenant=FLOODER)
    engine.run()
    for key in range(3, 30):
        engine.submit(key, prompt(key, 2), max_tokens=50, tenant=FLOODER)
    engine.run_some(10)
    assert engine.scheduler.load.running == 8
    engine.run_some(20)

    assert engine.scheduler.load.running == 10


def test_a_step_is_full_where_the_other_tenants_need_less_than_their_share() -> None:
    engine = make_engine(num_pages=100, max_num_tokens=10)
    engine.submit(1, prompt(1, 60), tenant=FLOODER)
    engine.submit(2, prompt(2, 3), tenant=QUIET)

    engine.step()

    assert sorted(map(len, engine.computed())) == [3, 7]


def test_what_was_kept_for_those_that_cannot_begin_is_not_wasted() -> None:
    engine = make_engine(num_pages=100, max_num_tokens=10, max_batch_size=1)
    engine.submit(1, prompt(1, 30), tenant=FLOODER)
    engine.submit(2, prompt(2, 30), tenant=QUIET)

    engine.step()

    assert list(map(len, engine.computed())) == [10]


def test_who_made_way_goes_on_before_anybody_new() -> None:
    engine = make_engine(num_pages=8)
    engine.submit(1, [1, 1], max_tokens=8, tenant=FLOODER)
    engine.submit(2, [2, 2], max_tokens=8, tenant=FLOODER)
    engine.submit(3, [3, 3], max_tokens=8, tenant=FLOODER)
    while not engine.scheduler.load.suspended:
        engine.step()
    suspended = {1, 2, 3} - set(engine.batch_keys())
    engine.submit(4, [4, 4], max_tokens=1, tenant=QUIET)
    order: list[int] = []
    while len(order) < 4 and engine.step() is not None:
        order += [key for key in engine.batch_keys() if key not in order]

    assert order.index(4) > max(order.index(key) for key in suspended)


def test_a_flood_leaves_room_in_the_queue_for_others() -> None:
    engine = make_engine(max_queued_requests=20)
    rejections = [engine.submit(key, prompt(key, 2), tenant=FLOODER) for key in range(1, 30)]

    assert sum(one is None for one in rejections) == 16
    assert rejections[-1] == Rejection("OVERLOADED", "16 requests are queued of this tenant, 16 in all", retryable=True)
    assert engine.submit(30, prompt(30, 2), tenant=QUIET) is None


def test_a_cancelled_request_leaves_the_queue_and_costs_its_tenant_nothing() -> None:
    engine = make_engine(max_batch_size=1, num_pages=32)
    engine.submit(1, prompt(1, 4), tenant=QUIET)
    engine.submit(2, prompt(2, 30), tenant=FLOODER)
    engine.submit(3, prompt(3, 2), tenant=FLOODER)
    engine.submit(4, prompt(4, 4), tenant=OTHER)
    engine.scheduler.cancel(RequestKey(2))

    assert began(engine) == [1, 3, 4]
    assert engine.scheduler.load.queued_tokens == 0


def test_generation_legs_take_turns_too() -> None:
    engine = make_engine(max_batch_size=1, num_pages=32)
    for key in (1, 2, 3):
        engine.submit(key, prompt(key, 6), phase=Phase.GENERATION, first_token=7, max_tokens=3, tenant=FLOODER)
    engine.submit(4, prompt(4, 6), phase=Phase.GENERATION, first_token=7, max_tokens=3, tenant=QUIET)
    order = []
    for _ in range(4):
        told = engine.run()
        (key,) = [one.key for one in told if isinstance(one, Started)]
        order.append(key)
        engine.scheduler.cancel(key)
        engine.scheduler.pull_failed(key, "next")

    assert order == [1, 4, 2, 3]


SCRIPT = """
from tests.worker.core.engines import make_engine
from tests.worker.core.test_fair_turns import began, prompt
engine = make_engine(max_batch_size=2, num_pages=64)
for key in range(1, 40):
    engine.submit(key, prompt(key, 2 + key * 7 % 11), tenant=b"tenant %d" % (key % 7))
print(began(engine))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_order_does_not_depend_on_how_anything_is_hashed(seed: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
    )
    engine = make_engine(max_batch_size=2, num_pages=64)
    for key in range(1, 40):
        engine.submit(key, prompt(key, 2 + key * 7 % 11), tenant=b"tenant %d" % (key % 7))

    assert ended.stdout.decode().strip() == str(began(engine))
