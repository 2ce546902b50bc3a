"""Ranks that are given the same plans decide alike, and one that does not is found out."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import msgspec
import pytest

from tests.worker.core.engines import ANSWER, make_engine, make_request
from worker.core.config import CacheConfig, ReusePolicy, SchedulerConfig
from worker.core.journal import REMEMBERED, Journal
from worker.core.plan import decode, encode
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.tiers import Tier
from worker.core.types import Phase, RequestKey, Sampled

NUM_PAGES = 16


def recorded_plans() -> tuple[list[bytes], str]:
    """Some hundred plans of a worker under pressure, and rank 0's digest after them."""
    dice = random.Random(7)
    replica = Replica(CacheConfig(NUM_PAGES, 2, policy=ReusePolicy.PER_CONVERSATION))
    scheduler = Scheduler(SchedulerConfig(4, 8), replica, lambda request: b"")
    plans: list[bytes] = []
    for key in range(60):
        prompt = [1, 2, 3, 4, *(dice.choice([5, 6]) for _ in range(dice.randrange(12)))]
        phase = dice.choice([Phase.CONTEXT, Phase.AGGREGATED])
        child = f"child {dice.randrange(9)}"
        scheduler.submit(make_request(key, prompt, phase=phase, max_tokens=6, conversation=child, parent="parent"))
        for _ in range(4):
            made = scheduler.plan(key)
            if made is None:
                break
            plan, work = made
            plans.append(encode(plan))
            keys = work.batch.sample_requests if work.batch is not None else ()
            scheduler.complete(plan, Sampled(keys, (ANSWER,) * len(keys)))
        if key % 3:
            scheduler.released(RequestKey(key - 1))
    assert any(decision.act.startswith("evict") for decision in replica.decisions)
    return plans, replica.digest.hex()


def test_ranks_with_other_hash_seeds_reach_the_same_digest() -> None:
    plans, digest = recorded_plans()

    for seed in ("1", "2"):
        ended = subprocess.run(
            [sys.executable, "-m", "tests.worker.core.replay"],
            input=msgspec.msgpack.encode((NUM_PAGES, plans)),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        assert ended.stdout.decode() == digest


def test_a_rank_that_takes_another_page_differs_in_its_digest_and_names_the_decision() -> None:
    plans, _ = recorded_plans()
    config = CacheConfig(NUM_PAGES, 2, policy=ReusePolicy.PER_CONVERSATION)
    sound, corrupt = Replica(config), Replica(config)
    free = corrupt.cache.pools.free[Tier.DEVICE]
    free.give(free.take(2)[::-1])
    sound.apply(decode(plans[0]))
    corrupt.apply(decode(plans[0]))

    assert sound.digest != corrupt.digest
    differing = next(pair for pair in zip(sound.decisions, corrupt.decisions, strict=True) if pair[0] != pair[1])
    assert [(one.plan, one.act, one.subject) for one in differing] == [(1, "chunk", 0)] * 2


def test_a_follower_that_lacks_the_pages_of_a_plan_says_so_rather_than_going_on() -> None:
    engine = make_engine(num_pages=4)
    engine.submit(1, [1, 2, 3])
    made = engine.scheduler.plan(0)
    assert made is not None
    smaller = Replica(CacheConfig(num_pages=1, tokens_per_block=2))

    with pytest.raises(AssertionError, match="rank 0 had pages"):
        smaller.apply(decode(encode(made[0])))


def test_a_plan_survives_its_journey() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], conversation="child", parent="parent", salt=b"\x00salt")
    made = engine.scheduler.plan(12)
    assert made is not None

    assert decode(encode(made[0])) == made[0]


def test_an_admission_carries_only_the_tokens_behind_the_match() -> None:
    engine = make_engine(num_pages=600)
    engine.submit(1, [*range(1000), 1])
    engine.run()
    engine.submit(2, [*range(1000), 2])
    made = engine.scheduler.plan(0)
    assert made is not None

    assert len(encode(made[0])) < 60


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(msgspec.msgpack.encode([1, 2, [["unknown act"]]]))


def test_the_last_decisions_are_kept_and_older_ones_still_count_in_the_digest() -> None:
    journals = Journal(), Journal()
    for rank, journal in enumerate(journals):
        journal.begin(1)
        journal.note("chunk", 1, rank)
        for key in range(REMEMBERED):
            journal.note("chunk", key)

    assert journals[0].decisions == journals[1].decisions
    assert len(journals[0].decisions) == REMEMBERED
    assert journals[0].close() != journals[1].close()
