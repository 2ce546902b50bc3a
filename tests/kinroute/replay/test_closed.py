from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinroute.replay.arm import HANDOFF_MS, Arm
from kinroute.replay.closed import seconds_of_burst, steps_within
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.results import RunResult, Service
from kinroute.replay.service import CostModel
from kinroute.replay.simulation import simulate
from tests.kinroute.replay.loads import load
from tests.kinroute.replay.plain import asked
from worker.core.step_load import StepLoad

PLAIN = CostModel(
    step_s=1.0, prefill_token_s=0.5, prefill_context_s=0.0, decode_token_s=0.25, decode_context_s=0.0, max_num_tokens=16
)
"""Of a prompt whose steps are whole numbers of seconds."""


def run(requests: list[PlayedRequest], policy: str = "lru", capacity: int = 200, **members: Any) -> RunResult:
    return simulate(requests, Arm(policy, capacity, closed_loop=True, **members), lambda ended: None)


def served(requests: list[PlayedRequest], **members: Any) -> Service:
    service = run(requests, warmup=0.0, **{"costs": PLAIN, **members}).service
    assert service is not None
    return service


def test_the_first_token_comes_when_the_prompt_is_prefilled_and_the_others_a_step_each() -> None:
    service = served([asked(0.0, (0, 3), output=5)])

    assert service.ttft_p50_s == 1.0 + 12 * 0.5
    assert service.makespan_s == 7.0 + 4 * 1.25
    assert (service.output_tokens, service.output_tokens_per_s) == (5, 5 / 12)
    assert service.busy_share == 1.0


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    assert served([asked(0.0, (0, 10))]).ttft_p50_s == 3 * 1.0 + 40 * 0.5


def test_prefill_costs_more_the_more_it_looks_at() -> None:
    costs = dataclasses.replace(PLAIN, prefill_token_s=0.0, prefill_context_s=0.01)

    # 1 + 2 + ... + 40 tokens are looked at, in three steps.
    assert served([asked(0.0, (0, 10))], costs=costs).ttft_p50_s == pytest.approx(3.0 + 0.01 * 820)


def test_a_turn_comes_its_think_time_after_the_answer_however_long_that_took() -> None:
    turns = [asked(0.0, (0, 3), duration_s=2.0), asked(5.0, (0, 5), duration_s=1.0)]

    service = served(turns)

    # The second finds 3 blocks and prefills the other 2.
    assert service.makespan_s == 7.0 + 3.0 + (1.0 + 8 * 0.5)
    assert service.ttft_p99_s == 7.0


def test_requests_queue_for_compute() -> None:
    both = [asked(0.0, (0, 4), conversation="a"), asked(0.0, (10, 4), conversation="b", play=1, lane=1)]

    assert served(both).ttft_p99_s == 2 * (1.0 + 16 * 0.5)


def test_a_prefill_goes_on_beside_those_that_decode() -> None:
    decoding = asked(0.0, (0, 3), output=9)
    coming = asked(8.0, (10, 3), conversation="b", play=1, lane=1)

    service = served([decoding, coming])

    # It comes within the first decode step, waits for its end at 8.25, and is prefilled beside the second.
    assert service.ttft_p99_s == pytest.approx(8.25 + 1.0 + 12 * 0.5 + 0.25 - 8.0)
    assert service.makespan_s == pytest.approx(8.25 + 7.25 + 6 * 1.25)


def test_in_role_context_the_generation_side_answers_once_it_has_the_pages() -> None:
    turns = [asked(0.0, (0, 3), output=5), asked(3.0, (0, 3))]

    service = served(turns, role="context")

    ended_s = 7.0 + HANDOFF_MS / 1000 + 4 * 1.25
    assert service.makespan_s == pytest.approx(ended_s + 2.0 + 1.0 + 4 * 0.5 + HANDOFF_MS / 1000)


def test_a_better_cache_shortens_the_run() -> None:
    requests = load(7, 200)

    small, large = (served(requests, capacity=capacity) for capacity in (60, 400))

    assert large.makespan_s < small.makespan_s
    assert large.ttft_mean_s < small.ttft_mean_s
    assert large.requests_per_s > small.requests_per_s


def test_either_order_of_arms_gives_the_same() -> None:
    requests = load(8, 120)

    forth = [run(requests, policy, capacity=80) for policy in ("lru", "subagent")]
    back = [run(requests, policy, capacity=80) for policy in ("subagent", "lru")]

    assert forth == back[::-1]
    assert forth[0].service != forth[1].service


@pytest.mark.parametrize("role", ["aggregated", "context"])
def test_every_answer_ends_with_tiers_and_ranks_and_too_little_room(role: str) -> None:
    requests = load(9, 150)

    one, two = (run(requests, "subagent", 50, role=role, host_blocks=30, tp=tp, warmup=0.0) for tp in (1, 2))

    assert one.digest == two.digest
    assert one.service == two.service
    assert one.service is not None
    assert one.counted == 150


def test_a_burst_takes_as_long_as_its_steps_one_by_one() -> None:
    costs = CostModel(max_num_tokens=1 << 20)
    load = StepLoad(decode_tokens=3, decode_context=5000)

    one_by_one = sum(costs.seconds(load._replace(decode_context=5000 + 3 * step)) for step in range(1, 101))

    assert seconds_of_burst(100, load, costs) == pytest.approx(one_by_one)


@given(
    st.integers(1, 64), st.integers(1, 10**6), st.floats(0.0, 100.0), st.sampled_from([0.0, 1e-9, 1e-6]),
)  # fmt: skip
def test_as_many_steps_are_in_a_burst_as_end_in_time(tokens: int, context: int, seconds: float, each_s: float) -> None:
    costs = dataclasses.replace(CostModel(), decode_context_s=each_s)
    load = StepLoad(decode_tokens=tokens, decode_context=context)

    steps = steps_within(seconds, load, costs)

    assert seconds_of_burst(steps, load, costs) <= seconds * (1 + 1e-9)
    assert seconds_of_burst(steps + 1, load, costs) > seconds * (1 - 1e-9)
