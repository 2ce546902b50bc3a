from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kinroute.replay.hints import Hints
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.results import RunResult
from kinroute.replay.simulation import Arm, simulate
from tests.kinroute.replay.loads import load
from tests.kinroute.replay.plain import asked

POLICIES = ("lru", "subagent", "return_index")


def run(requests: list[PlayedRequest], policy: str = "lru", capacity: int = 80, **members: Any) -> RunResult:
    return simulate(requests, Arm(policy, capacity, **members), lambda ended: None)


def test_a_prompt_finds_the_blocks_of_the_one_before() -> None:
    result = run([asked(0.0, (0, 3)), asked(5.0, (0, 5))], warmup=0.0)

    assert (result.prompt_blocks, result.hit_blocks) == (8, 3)
    assert result.uncached_tokens == 5 * 4


def test_the_last_block_of_a_prompt_is_computed_again() -> None:
    assert run([asked(0.0, (0, 3)), asked(5.0, (0, 3))], warmup=0.0).hit_blocks == 2


@pytest.mark.parametrize(("role", "hits"), [("aggregated", 5), ("context", 3)])
def test_a_reply_is_found_where_it_was_generated(role: str, hits: int) -> None:
    first = asked(0.0, (0, 3), output=9, answer_blocks=((3, 3),))

    assert run([first, asked(5.0, (0, 7))], warmup=0.0, role=role).hit_blocks == hits


def test_requests_of_the_warm_up_are_not_counted() -> None:
    result = run([asked(0.0, (0, 3)), asked(5.0, (0, 5))], warmup=0.5)

    assert (result.counted, result.prompt_blocks, result.hit_blocks) == (1, 5, 3)


def test_what_was_used_longest_ago_makes_room_from_its_end() -> None:
    requests = [asked(0.0, (0, 3)), asked(5.0, (10, 3), conversation="b"), asked(10.0, (20, 3), conversation="c")]
    again = [*requests, asked(15.0, (10, 4), conversation="b"), asked(20.0, (0, 4))]

    assert run(again, capacity=9, warmup=0.0).hit_blocks == 3 + 2


def test_an_answer_keeps_its_blocks_until_its_recorded_end() -> None:
    held = asked(0.0, (0, 5), duration_s=60.0)
    pushing = [asked(5.0 + at, (10 * at, 4), conversation=f"{at}") for at in range(1, 4)]

    assert run([held, *pushing, asked(30.0, (0, 6))], capacity=12, warmup=0.0).hit_blocks == 5


def test_a_prompt_larger_than_the_cache_is_missed_as_a_whole() -> None:
    result = run([asked(0.0, (0, 30)), asked(5.0, (0, 2))], capacity=9, warmup=0.0)

    assert (result.refused, result.hit_blocks, result.uncached_tokens) == (1, 0, 32 * 4)


def test_a_finished_child_makes_room_for_what_comes_back() -> None:
    child: dict[str, Any] = {"conversation": "child", "parent": "a", "kind": "sub"}
    requests = [
        asked(0.0, (50, 4), conversation="old"),
        asked(5.0, (0, 2)),
        asked(10.0, (20, 6), **child),
        asked(20.0, (0, 3)),
        asked(30.0, (30, 6), conversation="new"),
        asked(40.0, (50, 5), conversation="old"),
    ]

    lru, subagent, unhinted = (
        run(requests, policy, capacity=18, warmup=0.0, hints=Hints(parent=parent))
        for policy, parent in (("lru", True), ("subagent", True), ("subagent", False))
    )

    assert (lru.hit_blocks, unhinted.hit_blocks, subagent.hit_blocks) == (2 + 3, 2 + 3, 2 + 4)
    assert (subagent.demotions, subagent.demoted_blocks) == (1, 6)
    assert unhinted.demotions == 0


def test_a_demoted_block_that_is_wanted_after_all_is_regretted() -> None:
    child: dict[str, Any] = {"conversation": "child", "parent": "a", "kind": "sub"}
    requests = [
        asked(0.0, (50, 4), conversation="old"),
        asked(5.0, (0, 2)),
        asked(10.0, (20, 6), **child),
        asked(20.0, (0, 3)),
        asked(30.0, (30, 6), conversation="new"),
        asked(40.0, (20, 7), **child),
    ]

    lru, subagent = (run(requests, policy, capacity=18, warmup=0.0) for policy in ("lru", "subagent"))

    assert (lru.regretted_blocks, lru.hit_blocks) == (0, 8)
    assert subagent.regretted_blocks == lru.hit_blocks - subagent.hit_blocks > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tiers", [{}, {"host_blocks": 40, "disk_blocks": 30}])
def test_ranks_that_lag_behind_decide_alike(policy: str, tiers: dict[str, int]) -> None:
    requests = load(1, 150)

    one, two, four = (run(requests, policy, tp=tp, **tiers) for tp in (1, 2, 4))

    assert one.digest == two.digest == four.digest
    assert one.hit_blocks == four.hit_blocks > 0


def test_colder_tiers_keep_what_the_device_cannot() -> None:
    requests = load(2, 200)

    alone = run(requests, capacity=60)
    tiers = run(requests, capacity=60, host_blocks=60, disk_blocks=60)
    larger = run(requests, capacity=180)

    assert alone.hit_blocks < tiers.hit_blocks <= larger.hit_blocks
    assert tiers.offloaded_blocks["host"] > tiers.onboarded_blocks["host"] > 0
    assert tiers.offloaded_blocks["disk"] > 0


def test_the_same_load_gives_the_same_result() -> None:
    assert run(load(3, 100)) == run(load(3, 100))


def test_a_result_says_where_the_rest_went() -> None:
    result = run(load(4, 200), "subagent", capacity=90, host_blocks=20)

    assert result.tails["all"].requests == result.counted == 150
    kinds = [tail for name, tail in result.tails.items() if name not in ("all", "session")]
    assert sum(tail.requests for tail in kinds) == 150
    assert sum(tail.mean * tail.requests for tail in kinds) == pytest.approx(result.uncached_tokens)
    sessions = result.tails["session"]
    assert sessions.mean * sessions.requests == pytest.approx(result.uncached_tokens)
    assert sessions.worst == result.sessions[0].uncached_tokens
    assert sum(one.requests for one in result.sessions) == 150
    for sample in result.timeline:
        device = sample.tiers["device"]
        assert device.free + device.held + device.idle + device.moving == device.total == 90
        assert device.demoted <= device.idle
    assert result.family is not None
    assert {member.parent for member in result.family.members} >= {None, result.family.members[0].conversation}
    assert json.loads(json.dumps(dataclasses.asdict(result)))["policy"] == "subagent"


@pytest.mark.parametrize(("seed", "requests", "capacity"), [(1, 60, 33), (10, 30, 18)])
def test_a_request_that_made_way_speaks_once_all_the_same(seed: int, requests: int, capacity: int) -> None:
    result = run(load(seed, requests, alive=6), capacity=capacity, warmup=0.0)

    assert result.suspensions > 0
    assert result.counted == requests


def test_progress_is_told_until_all_have_ended() -> None:
    told: list[int] = []

    simulate(load(5, 250), Arm("lru", 90), told.append)

    assert told == [100, 200, 250]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"policy": "fifo"}, "fifo"),
        ({"capacity_blocks": 0}, "at least one"),
        ({"warmup": 1.0}, "warmup"),
        ({"tp": 0}, "tp is 0"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(members: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate(load(6, 5), Arm(**{"policy": "lru", "capacity_blocks": 90, **members}), lambda ended: None)


def test_nothing_to_play_is_refused() -> None:
    with pytest.raises(ValueError, match="one size"):
        run([])
