"""Whose blocks leave, on two ranks that decide alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.worker.core.engines import TestEngine, make_engine
from worker.core.config import RetentionPolicy, ReusePolicy
from worker.core.conversations import News, StopReason
from worker.core.plan import Learned
from worker.core.returns.ages import NUM_BUCKETS, bucket_of
from worker.core.returns.classes import EVERYBODY, Children, Features, class_of
from worker.core.returns.explained import explained
from worker.core.returns.index import ReturnIndex
from worker.core.returns.tables import ABANDONED, IN_FLIGHT, PRIOR, Tables, packed, unpacked

A, B, C, D = [1, 1, 2, 2, 0], [3, 3, 4, 4, 0], [5, 5, 6, 6, 0], [7, 7, 8, 8, 0]
"""Prompts of two blocks and a token."""


def engine(num_pages: int = 9) -> TestEngine:
    return make_engine(
        num_pages=num_pages, policy=ReusePolicy.PER_CONVERSATION, retention_policy=RetentionPolicy.RETURN_INDEX
    )


def index_of(one: TestEngine) -> ReturnIndex:
    assert one.replica.index is not None
    return one.replica.index


def turn(one: TestEngine, key: int, prompt: Sequence[int], name: str, parent: str | None = None) -> None:
    """A request with an answer of one token, from beginning to end."""
    one.submit(key, prompt, conversation=name, parent=parent)
    one.run()


def cached(one: TestEngine, prompt: Sequence[int]) -> int:
    return one.replica.cache.match(b"", np.array(prompt, np.int32), len(prompt) // 2).blocks


def learned(one: TestEngine, **rows: Sequence[int]) -> None:
    """Every rank hears of these tables, with the next plan."""
    groups = {name: class_of(Features(stop=StopReason[name])) for name in rows}
    one.scheduler._due.append(Learned(*packed({EVERYBODY: PRIOR} | {groups[name]: rows[name] for name in rows})))
    one.run()


def test_before_anything_is_learned_who_was_used_longest_ago_leaves_first() -> None:
    one = engine()
    for key, (name, prompt) in enumerate({"a": A, "b": B, "c": C}.items(), 1):
        turn(one, key, prompt, name)
        one.now_ms += 5000

    turn(one, 9, [*D, 9, 9, 9, 9], "d")

    assert [cached(one, prompt) for prompt in (A, B, C)] == [0, 2, 2]


def test_what_its_conversation_went_on_without_leaves_before_what_is_older() -> None:
    one = engine()
    turn(one, 1, A, "a")
    one.now_ms += 5000
    turn(one, 2, B, "b")
    one.now_ms += 5000
    turn(one, 3, C, "b")

    turn(one, 9, [*D, 9, 9, 9, 9], "d")

    assert [cached(one, prompt) for prompt in (A, B, C)] == [2, 0, 2]


def test_what_was_learned_of_a_class_decides_over_age() -> None:
    one = engine()
    for key, (name, prompt, reason) in enumerate(
        [("a", A, StopReason.TOOL_CALL), ("b", B, StopReason.END_OF_TURN), ("c", C, StopReason.TOOL_CALL)], 1
    ):
        turn(one, key, prompt, name)
        one.scheduler.heard(name, News.ENDED, reason, final=False)
        one.run()
        one.now_ms += 5000
    learned(one, TOOL_CALL=[9000] * NUM_BUCKETS, END_OF_TURN=[5000] * NUM_BUCKETS)

    turn(one, 9, [*D, 9, 9, 9, 9], "d")

    assert [cached(one, prompt) for prompt in (A, B, C)] == [2, 0, 2]


def test_a_switch_to_lru_and_back_changes_who_leaves() -> None:
    one = engine()
    turn(one, 1, A, "a")
    turn(one, 2, B, "b")
    turn(one, 3, C, "b")
    one.scheduler.switch(RetentionPolicy.LRU)
    one.run()

    turn(one, 9, [*D, 9, 9, 9, 9], "d")
    assert [cached(one, prompt) for prompt in (A, B, C)] == [0, 2, 2]

    one.scheduler.switch(RetentionPolicy.RETURN_INDEX)
    one.run()
    assert index_of(one).is_active
    assert explained(index_of(one), "b")["why"] == "nothing is learned yet: the younger the longer"  # type: ignore[index]


def test_a_conversation_with_a_request_in_flight_is_worth_more_than_any_that_is_idle() -> None:
    one = engine(num_pages=20)
    turn(one, 1, A, "a")
    claim = index_of(one).find("a")
    assert claim is not None
    assert 0 < claim.value < IN_FLIGHT

    one.scheduler.heard("a", News.GENERATING, final=False)
    one.run()
    assert claim.value == IN_FLIGHT

    one.scheduler.heard("a", News.ENDED, StopReason.TOOL_CALL, final=False)
    one.run()
    assert 0 < claim.value < IN_FLIGHT


def test_an_age_counts_from_the_end_of_a_turn_and_rises_with_plan_time() -> None:
    one = engine(num_pages=20)
    turn(one, 1, A, "a")
    claim = index_of(one).find("a")
    assert claim is not None

    one.now_ms += 70_000
    turn(one, 2, B, "b")
    assert claim.bucket == bucket_of(70_000)
    assert claim.value == PRIOR[claim.bucket]


def test_a_parents_age_counts_from_its_childs_end() -> None:
    one = engine(num_pages=20)
    turn(one, 1, A, "root")
    one.now_ms += 70_000
    turn(one, 2, B, "child", "root")
    one.now_ms += 400
    turn(one, 3, C, "other")

    root = index_of(one).find("root")
    assert root is not None
    assert root.bucket == bucket_of(400)


def test_what_children_do_is_part_of_their_parents_class() -> None:
    one = engine(num_pages=20)
    turn(one, 1, A, "root")
    root = index_of(one).find("root")
    assert root is not None
    assert root.group == class_of(Features())

    one.submit(2, B, conversation="child", parent="root", max_tokens=3)
    one.step()
    assert root.group == class_of(Features(children=Children.IN_FLIGHT))
    one.run()
    assert root.group == class_of(Features(children=Children.ENDED))


def test_a_return_is_learned_of_and_a_new_beginning_is_not() -> None:
    one = engine(num_pages=30)
    told: list[tuple[str, int, int]] = []

    class Watch:
        def idled(self, group: int, from_ms: int, to_ms: int) -> None:
            told.append(("idled", from_ms, to_ms))

        def returned(self, group: int, age_ms: int) -> None:
            told.append(("returned", age_ms, age_ms))

    index_of(one).watcher = Watch()
    turn(one, 1, A, "a")
    one.now_ms += 3000
    turn(one, 2, [*A, 9, 9, 9], "a")
    one.now_ms += 2000
    turn(one, 3, D, "a")

    assert told == [("idled", 0, 3000), ("returned", 3000, 3000), ("idled", 0, 2000)]


def test_blocks_of_a_request_without_a_conversation_age_too() -> None:
    one = engine(num_pages=20)
    turn(one, 1, A, "")
    run = next(run for run in one.replica.cache.tree.runs() if run.length)
    young = run.value

    one.now_ms += 70_000
    turn(one, 2, B, "b")

    assert young == PRIOR[0]
    assert run.value == PRIOR[bucket_of(70_000)]


def test_a_forgotten_conversations_blocks_are_nobodys() -> None:
    one = make_engine(
        num_pages=20,
        policy=ReusePolicy.PER_CONVERSATION,
        retention_policy=RetentionPolicy.RETURN_INDEX,
        max_tracked_conversations=1,
    )
    turn(one, 1, A, "a")
    run = next(run for run in one.replica.cache.tree.runs() if run.length)
    turn(one, 2, B, "b")

    assert run.value == ABANDONED
    assert index_of(one).find("a") is None


def test_tables_come_out_of_a_plan_as_they_went_in() -> None:
    rows = {EVERYBODY: tuple(range(NUM_BUCKETS)), 7: tuple(range(100, 100 + NUM_BUCKETS))}

    tables = unpacked(*packed(rows))

    assert {group: tuple(row) for group, row in tables.rows.items()} == rows
    assert tables.value(7, 3) == 103
    assert tables.value(8, 3) == 3
    assert Tables().value(8, 0) > Tables().value(8, 1)


def test_it_is_told_why_a_conversation_is_worth_what_it_is() -> None:
    one = engine(num_pages=20)
    turn(one, 1, A, "a")
    one.scheduler.heard("a", News.ENDED, StopReason.TOOL_CALL, final=True)
    one.run()
    one.now_ms += 1000
    learned(one, TOOL_CALL=[8000] * NUM_BUCKETS)

    told = explained(index_of(one), "a")

    assert told is not None
    assert told["class"] == {
        "final": "yes", "stop_reason": "tool_call", "kind": "root", "turns": "1 to 1", "children": "none",
        "output_tokens": "0 to 149",
    }  # fmt: skip
    assert told["age_ms"] == [1000, 1189]
    assert told["why"] == "learned of all classes together, as its own is new, at this age"
    assert explained(index_of(one), "stranger") is None
