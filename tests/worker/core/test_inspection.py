"""What an operator is told of families, of demotions that would happen, and of blocks."""

from __future__ import annotations

from typing import Any

from tests.worker.core.engines import TestEngine, make_engine
from worker.core import inspection
from worker.core.config import ReusePolicy
from worker.core.types import Phase, RequestKey


def family_of_two(**members: Any) -> TestEngine:
    """A root with three blocks, a child that shares one of them and owns two, a second child beside it, all idle."""
    engine = make_engine(
        num_pages=32,
        policy=ReusePolicy.PER_CONVERSATION,
        finished_subagent_priority=1,
        finished_subagent_min_idle_iterations=4,
        **members,
    )
    prompts = {"root": [1, 1, 2, 2, 3, 3, 0], "one": [1, 1, 7, 7, 8, 8, 0], "two": [1, 1, 7, 7, 9, 9, 0]}
    for key, (conversation, prompt) in enumerate(prompts.items(), start=1):
        parent = None if conversation == "root" else "root"
        engine.submit(key, prompt, phase=Phase.CONTEXT, conversation=conversation, parent=parent)
        engine.step()
        engine.scheduler.released(RequestKey(key))
        engine.step()
    return engine


def test_families_tell_parents_states_blocks_by_tier_and_idle_steps() -> None:
    engine = family_of_two()

    told = inspection.families(engine.replica, family="root", limit=10)

    assert [one["conversation"] for one in told] == ["root", "one", "two"]
    assert told[1] == {
        "conversation": "one",
        "parent": "root",
        "state": "idle",
        "blocks": {"device": 2, "host": 0, "disk": 0},
        "priority": [35, 35],
        "idle_steps": 3,
    }
    assert len(inspection.families(engine.replica, family=None, limit=2)) == 2
    assert inspection.families(engine.replica, family="stranger", limit=2) == []


def test_a_dry_run_tells_who_waits_and_for_how_long() -> None:
    engine = family_of_two()

    one, two = inspection.dry_run(engine.replica, "root")["children"]

    assert (one["finished"], one["why_not"]) == (True, None)
    assert (two["finished"], two["why_not"], two["steps_left"]) == (False, "not idle for long enough", 2)


def test_a_dry_run_tells_what_a_return_then_does() -> None:
    engine = family_of_two()
    (child,) = inspection.dry_run(engine.replica, "root")["children"][0]["group"]
    assert child["would_demote"]["blocks"] == 1
    assert child["would_demote"]["stretches"][0]["position"] == 2
    assert [(part["blocks"], part["why"]) for part in child["stays"]["stretches"]] == [(1, inspection.EXTENDED)]

    engine.submit(9, [1, 1, 2, 2, 3, 3, 4, 4], phase=Phase.CONTEXT, conversation="root")
    engine.step()

    one = inspection.families(engine.replica, family="one", limit=1)[0]
    assert (one["state"], one["priority"]) == ("demoted", [1, 35])
    gone = bytes.fromhex(child["would_demote"]["stretches"][0]["first_key"])
    kept = bytes.fromhex(child["stays"]["stretches"][0]["first_key"])
    assert inspection.block(engine.replica, gone)["priority"] == 1
    assert inspection.block(engine.replica, kept) == {
        "state": "resident",
        "tier": "device",
        "priority": 35,
        "owner": "one",
        "demoted": False,
        "held": False,
        "position": 1,
    }


def test_a_dry_run_tells_whose_prefix_each_child_reused() -> None:
    engine = family_of_two()

    one, two = [child["group"][0]["reused"] for child in inspection.dry_run(engine.replica, "root")["children"]]

    assert [(part["position"], part["blocks"], part["owner"]) for part in one["stretches"]] == [(0, 1, "root")]
    assert [(part["position"], part["owner"]) for part in two["stretches"]] == [(0, "root"), (1, "one")]
    assert two["blocks"] == 2


def test_what_is_left_to_a_request_is_told_as_held() -> None:
    engine = family_of_two()
    engine.submit(9, [1, 1, 7, 7, 8, 8, 5, 5], phase=Phase.CONTEXT, conversation="stranger")
    engine.step()

    (child,) = inspection.dry_run(engine.replica, "root")["children"][0]["group"]

    assert child["would_demote"]["blocks"] == 0
    assert {part["why"] for part in child["stays"]["stretches"]} == {inspection.HELD}


def test_an_evicted_block_tells_why_and_an_unknown_one_that_it_is_unknown() -> None:
    engine = family_of_two()
    run = engine.replica.cache.tree.owners.of("two")[0]
    key = run.key(0)
    engine.scheduler.clear()
    engine.step()

    assert inspection.block(engine.replica, key) == {
        "state": "evicted",
        "reason": "cleared",
        "plan": engine.replica.number,
        "priority": 35,
    }
    assert inspection.block(engine.replica, b"?" * 32) == {"state": "unknown"}
