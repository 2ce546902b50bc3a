"""Finished sub-agents: which children a return demotes and when, which blocks of theirs, and what comes back.

Wherever blocks leave, the test names a survivor that an order by last use alone would have taken first.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.core.lineages import BOUND, LOW, Family
from worker.core.conversations import News, StopReason
from worker.core.outputs import Started
from worker.core.tiers import Tier
from worker.core.types import DEFAULT_PRIORITY, Phase, Retention, TokenRange

STRANGER = (9, 9, 8, 8, 0)
PARENT = (1, 1, 2, 2, 0)
PARENT_AGAIN = (1, 1, 2, 2, 7, 7, 0)
CHILD = (1, 1, 3, 3, 4, 4, 0)
GRANDCHILD = (1, 1, 3, 3, 5, 5, 0)


def with_a_child(**members: Any) -> Family:
    """An old stranger, a parent, and a child that has shared one block of it and owns two; all of them idle."""
    family = Family(**members)
    family.ask("stranger", *STRANGER)
    family.ask("parent", *PARENT)
    family.ask("child", *CHILD, parent="parent")
    return family


@pytest.mark.parametrize(
    ("priority", "stranger", "child"), [(None, 0, 3), (LOW, 2, 1)], ids=["without demotion", "with demotion"]
)
def test_per_conversation_policy_demotes_finished_subagent_when_parent_returns(
    priority: int | None, stranger: int, child: int
) -> None:
    """The stranger is the survivor: without demotion the very same pressure takes it, and spares the child."""
    family = with_a_child(priority=priority)
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)

    family.press(2)

    assert (family.cached(*STRANGER), family.cached(*CHILD)) == (stranger, child)
    assert family.cached(*PARENT_AGAIN) == 3


def test_what_is_demoted_is_what_the_child_owns_and_nothing_that_it_found() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)

    family.ask("parent", *PARENT_AGAIN)

    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, LOW, LOW]
    assert family.priorities(*PARENT_AGAIN) == [DEFAULT_PRIORITY] * 3
    assert family.replica.cache.stats.demoted_blocks == 2


# When a child is finished.


@pytest.mark.parametrize(("idle", "demoted"), [(BOUND - 1, False), (BOUND, True), (BOUND + 1, True)])
def test_a_child_is_demoted_from_its_idle_bound_on(idle: int, demoted: bool) -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", idle)

    family.ask("parent", *PARENT_AGAIN)

    assert family.is_demoted("child") is demoted
    assert family.priorities(*CHILD)[1:] == [LOW if demoted else DEFAULT_PRIORITY] * 2


@pytest.mark.parametrize("idle", [BOUND - 1, BOUND, BOUND + 1])
def test_a_child_that_returns_around_its_idle_bound_is_idle_from_there_anew(idle: int) -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", idle)
    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="parent")

    family.pass_plans_until_idle("child", BOUND - 1)
    family.ask("parent", *PARENT_AGAIN)
    too_early = family.is_demoted("child")
    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)

    assert (too_early, family.is_demoted("child")) == (False, True)


@pytest.mark.parametrize("parent_first", [True, False])
def test_a_child_that_is_admitted_in_the_very_plan_of_the_return_is_in_flight(parent_first: bool) -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)

    asked = [("parent", PARENT_AGAIN, None), ("child", (*CHILD[:-1], 6, 6, 0), "parent")]
    for conversation, prompt, parent in asked if parent_first else asked[::-1]:
        family.submit(conversation, *prompt, parent=parent)
    family.engine.run()

    assert not family.is_demoted("child")
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY] * 3


def test_a_parent_that_returns_twice_in_one_step_demotes_a_child_once() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    family.submit("parent", *PARENT_AGAIN)
    family.submit("parent", *PARENT[:-1], 6, 6, 0)

    family.engine.step()

    assert family.engine.batch_keys() == [family.key - 1, family.key]
    assert family.replica.cache.stats.demoted_conversations == 1
    assert family.replica.cache.stats.demoted_blocks == 2


def test_a_child_in_flight_is_not_demoted_and_is_asked_again_at_the_next_return() -> None:
    family = with_a_child()
    running = family.submit("child", *CHILD[:-1], 6, 6, 0, parent="parent", max_tokens=100)
    family.engine.step()
    family.pass_plans_until_idle("child", BOUND)
    family.submit("parent", *PARENT_AGAIN)
    family.pass_plans(2)
    while_it_ran = family.is_demoted("child")
    family.scheduler.cancel(running)
    family.engine.run()

    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)

    assert (while_it_ran, family.is_demoted("child")) == (False, True)


def test_a_pinned_context_leg_keeps_its_conversation_in_flight_until_it_is_released() -> None:
    family = with_a_child()
    pinned = family.submit("child", *CHILD[:-1], 6, 6, 0, parent="parent", phase=Phase.CONTEXT, max_tokens=5)
    family.engine.run()
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)
    while_it_was_pinned = family.is_demoted("child")
    family.scheduler.released(pinned)

    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)

    assert (while_it_was_pinned, family.is_demoted("child")) == (False, True)


def test_a_generation_leg_elsewhere_keeps_the_child_in_flight_until_its_end_is_heard_of() -> None:
    """As when its link is lost too: then the mark ends for an unknown reason."""
    family = with_a_child()
    family.scheduler.heard("child", News.GENERATING, final=False)
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)
    while_it_generated = family.is_demoted("child")
    family.scheduler.heard("child", News.ENDED, StopReason.UNKNOWN, final=False)

    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)

    assert (while_it_generated, family.is_demoted("child")) == (False, True)


# Which blocks.


def test_what_two_children_share_is_kept_even_if_both_are_demoted_at_once() -> None:
    """The stranger and the shared block survive, which the order by last use would have taken first."""
    family = Family()
    family.ask("stranger", *STRANGER)
    family.ask("parent", *PARENT)
    family.ask("one", 1, 1, 3, 3, 4, 4, 0, parent="parent")
    family.ask("two", 1, 1, 3, 3, 5, 5, 0, parent="parent")
    family.pass_plans_until_idle("two", BOUND)

    family.ask("parent", *PARENT_AGAIN)

    assert (family.is_demoted("one"), family.is_demoted("two")) == (True, True)
    assert family.priorities(1, 1, 3, 3, 4, 4) == [DEFAULT_PRIORITY, DEFAULT_PRIORITY, LOW]
    assert family.priorities(1, 1, 3, 3, 5, 5) == [DEFAULT_PRIORITY, DEFAULT_PRIORITY, LOW]
    family.press(2)
    assert family.cached(1, 1, 3, 3, 4, 4) == family.cached(1, 1, 3, 3, 5, 5) == 2
    assert family.cached(*STRANGER) == 2


def test_a_page_that_a_request_holds_is_not_demoted() -> None:
    family = with_a_child()
    reader = family.submit("reader", *CHILD, max_tokens=100)
    family.engine.step()
    family.pass_plans_until_idle("child", BOUND)
    family.submit("parent", *PARENT_AGAIN)
    family.pass_plans(2)

    assert family.is_demoted("child")
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY] * 3
    family.scheduler.cancel(reader)
    family.engine.run()


def test_a_child_is_demoted_in_all_its_turns_and_branches() -> None:
    family = with_a_child()
    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="parent")
    family.ask("child", 1, 1, 3, 3, 7, 7, 0, parent="parent")
    family.pass_plans_until_idle("child", BOUND)

    family.ask("parent", *PARENT_AGAIN)

    assert family.priorities(1, 1, 3, 3, 4, 4, 6, 6) == [DEFAULT_PRIORITY, LOW, LOW, LOW]
    assert family.priorities(1, 1, 3, 3, 7, 7) == [DEFAULT_PRIORITY, LOW, LOW]


def test_ten_siblings_admitted_in_one_plan_prefill_their_common_prompt_once() -> None:
    family = Family(num_pages=128, max_batch_size=16)
    family.ask("parent", *PARENT)
    common = [1, 1, *(20 + block // 2 for block in range(16))]
    computed: list[list[int]] = []
    for sibling in range(10):
        family.submit(f"sibling {sibling}", *common, 50 + sibling, 50 + sibling, 0, parent="parent")

    told = []
    while (outputs := family.engine.step()) is not None:
        told += outputs
        computed += family.engine.computed()

    assert sum(20 in tokens for tokens in computed) == 1
    assert sorted(one.cached_tokens for one in told if isinstance(one, Started)) == [2, *[18] * 9]
    assert family.replica.cache.tree.owners.blocks("sibling 0") == 9
    assert [family.replica.cache.tree.owners.blocks(f"sibling {sibling}") for sibling in range(1, 10)] == [1] * 9


def test_siblings_whose_common_prefix_has_to_come_back_from_host_prefill_what_is_new_once() -> None:
    family = Family(num_pages=40, num_host_pages=64)
    family.ask("parent", 1, 1, 2, 2, 3, 3, 4, 4, 0)
    family.press(4)
    family.engine.end_copies()
    common = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    for sibling in range(4):
        family.submit(f"sibling {sibling}", *common, 50 + sibling, 50 + sibling, 0, parent="parent")
    family.engine.step()
    assert sum(len(copy.targets) for copy in family.engine.work.copies if copy.target is Tier.DEVICE) == 4
    computed: list[list[int]] = []
    while family.engine.end_copies() or family.scheduler.load.queued or family.scheduler.load.running:
        family.engine.step()
        computed += family.engine.computed()

    assert computed == [[5, 5, 6, 6, 50, 50, 0], *([50 + sibling, 50 + sibling, 0] for sibling in range(1, 4))]


# Coming back.


def test_a_child_that_comes_back_has_the_default_priority_again_on_what_is_left() -> None:
    """The stranger, the oldest, survives while the child is demoted, and is the next to go once it is back."""
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)
    family.press(1)
    assert (family.cached(*CHILD), family.cached(*STRANGER)) == (2, 2)

    family.ask("child", 1, 1, 3, 3, 6, 6, 0, parent="parent")
    family.press(3)

    assert family.priorities(1, 1, 3, 3, 6, 6) == [DEFAULT_PRIORITY] * 3
    assert family.cached(*STRANGER) == 0
    assert family.replica.cache.stats.restored_blocks == 1


def test_a_restored_child_that_finishes_again_is_demoted_again_with_all_its_turns() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)
    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="parent")
    assert family.priorities(*CHILD[:-1], 6, 6) == [DEFAULT_PRIORITY] * 4

    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)

    assert family.priorities(*CHILD[:-1], 6, 6) == [DEFAULT_PRIORITY, LOW, LOW, LOW]
    assert family.replica.cache.stats.demoted_conversations == 2


def test_a_child_is_restored_without_naming_its_parent_again() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)

    family.ask("child", *CHILD[:-1], 6, 6, 0)

    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY] * 3
    assert family.known("child").parent == "parent"


def test_a_demoted_child_is_not_demoted_a_second_time() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)

    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)

    assert family.replica.cache.stats.demoted_conversations == 1


def test_another_conversation_that_extends_demoted_blocks_makes_them_worth_keeping_again() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)

    family.ask("new child", 1, 1, 3, 3, 6, 6, 0, parent="parent")

    assert family.priorities(1, 1, 3, 3, 6, 6) == [DEFAULT_PRIORITY] * 3
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, DEFAULT_PRIORITY, LOW]


def test_a_demotion_wins_over_a_retention_that_lapses_later() -> None:
    family = Family()
    family.ask("parent", *PARENT)
    asked = Retention(ranges=(TokenRange(0, None, 80, 500),), decode_priority=80, decode_duration_ms=500)
    family.ask("child", *CHILD, parent="parent", retention=asked)
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, 80, 80]
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)

    family.engine.now_ms = 10_000
    family.pass_plans(1)

    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, LOW, LOW]


# Descendants.


def with_a_grandchild() -> Family:
    family = with_a_child()
    family.ask("grandchild", *GRANDCHILD, parent="child")
    return family


def test_a_child_that_waits_for_its_own_running_child_is_not_finished() -> None:
    family = with_a_grandchild()
    running = family.submit("grandchild", *GRANDCHILD[:-1], 6, 6, 0, parent="child", max_tokens=100)
    family.engine.step()
    family.pass_plans(BOUND)
    family.submit("parent", *PARENT_AGAIN)
    family.pass_plans(2)

    assert not family.is_demoted("child")
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY] * 3
    family.scheduler.cancel(running)
    family.engine.run()


@pytest.mark.parametrize(("idle", "demoted"), [(BOUND - 1, False), (BOUND, True)])
def test_a_child_whose_own_child_is_not_idle_yet_is_not_finished(idle: int, demoted: bool) -> None:
    family = with_a_grandchild()
    family.pass_plans_until_idle("grandchild", idle)

    family.ask("parent", *PARENT_AGAIN)

    assert family.is_demoted("child") is family.is_demoted("grandchild") is demoted


def test_a_demoted_child_takes_its_descendants_with_it_deepest_first() -> None:
    family = with_a_grandchild()
    family.ask("great-grandchild", *GRANDCHILD[:-1], 6, 6, 0, parent="grandchild")
    family.pass_plans_until_idle("great-grandchild", BOUND)

    family.ask("parent", *PARENT_AGAIN)

    demoted = [one.subject for one in family.replica.decisions if one.act == "demote"]
    assert demoted == ["great-grandchild", "grandchild", "child"]
    assert family.priorities(*GRANDCHILD[:-1], 6, 6) == [DEFAULT_PRIORITY, LOW, LOW, LOW]
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, LOW, LOW]


def test_a_child_that_returns_demotes_its_own_children_and_stays_itself() -> None:
    family = with_a_grandchild()
    family.pass_plans_until_idle("grandchild", BOUND)

    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="parent")

    assert (family.is_demoted("child"), family.is_demoted("grandchild")) == (False, True)
    assert family.priorities(*GRANDCHILD) == [DEFAULT_PRIORITY, DEFAULT_PRIORITY, LOW]


def test_a_grandchild_that_came_back_is_demoted_again_below_a_child_that_did_not() -> None:
    family = with_a_grandchild()
    family.pass_plans_until_idle("grandchild", BOUND)
    family.ask("parent", *PARENT_AGAIN)
    family.ask("grandchild", *GRANDCHILD[:-1], 6, 6, 0, parent="child")
    family.pass_plans_until_idle("grandchild", BOUND)

    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)

    assert family.is_demoted("grandchild")
    assert family.priorities(*GRANDCHILD[:-1], 6, 6) == [DEFAULT_PRIORITY, LOW, LOW, LOW]


# Whose child.


def test_a_child_of_an_unknown_parent_waits_for_it_under_its_id() -> None:
    family = Family()
    family.ask("child", *CHILD, parent="parent")
    family.pass_plans_until_idle("child", BOUND)

    family.ask("parent", *PARENT)

    assert family.is_demoted("child")
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, LOW, LOW]


def test_a_child_whose_parent_was_forgotten_first_is_demoted_when_that_comes_back() -> None:
    family = Family(max_tracked_conversations=2)
    family.ask("parent", *PARENT)
    family.ask("somebody", 5, 5, 0)
    family.ask("child", *CHILD, parent="parent")
    assert family.replica.conversations.find("parent") is None
    family.pass_plans_until_idle("child", BOUND)

    family.ask("parent", *PARENT_AGAIN)

    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, LOW, LOW]


def test_the_last_proven_parent_is_the_one_whose_return_counts() -> None:
    family = with_a_child()
    family.ask("adopter", 6, 6, 0)
    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="adopter")
    family.pass_plans_until_idle("child", BOUND)

    family.ask("parent", *PARENT_AGAIN)
    of_the_first = family.is_demoted("child")
    family.ask("adopter", 6, 6, 7, 7, 0)

    assert (of_the_first, family.is_demoted("child")) == (False, True)


def test_a_registration_that_would_close_a_circle_is_refused_and_nobody_demotes_its_ancestor() -> None:
    family = with_a_grandchild()
    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="grandchild")
    family.ask("parent", *PARENT_AGAIN, parent="grandchild")
    family.pass_plans(BOUND)

    family.ask("grandchild", *GRANDCHILD[:-1], 7, 7, 0, parent="child")

    assert family.known("parent").parent is None
    assert family.known("child").parent == "parent"
    assert not any(one.act == "demote" for one in family.replica.decisions)


# The register.


def test_a_full_register_forgets_the_oldest_idle_conversation_of_the_tenant_that_holds_most() -> None:
    """Its blocks keep their priority, and no return finds it any more; the older one of a small tenant stays."""
    family = Family(max_tracked_conversations=4, bound=20)
    family.ask("lone", 6, 6, 0, salt=b"other")
    family.ask("parent", *PARENT)
    family.ask("one", *CHILD, parent="parent")
    family.ask("two", *GRANDCHILD, parent="parent")
    family.ask("parent", *PARENT_AGAIN)

    family.ask("three", 1, 1, 5, 5, 0, parent="parent")

    assert [one.id for one in family.replica.conversations] == ["lone", "parent", "two", "three"]
    family.pass_plans_until_idle("three", 20)
    family.ask("parent", *PARENT_AGAIN[:-1], 5, 5, 0)
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY] * 3
    assert family.is_demoted("two")


def test_a_demoted_conversation_that_was_forgotten_is_restored_when_it_comes_back() -> None:
    family = with_a_child(max_tracked_conversations=3)
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)
    for newcomer in range(3):
        family.ask(f"newcomer {newcomer}", 5 + newcomer, 5, 0)
    assert family.replica.conversations.find("child") is None

    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="parent")

    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY] * 3


# What is no return.


@pytest.mark.parametrize(
    ("same", "other"), [({"turn": "7"}, {"turn": "8"}), ({"prompt_hash": b"7"}, {"prompt_hash": b"8"})]
)
def test_a_retry_of_the_same_turn_or_prompt_is_no_return(same: dict[str, Any], other: dict[str, Any]) -> None:
    family = with_a_child()
    family.ask("parent", *PARENT_AGAIN, **same)
    family.pass_plans_until_idle("child", BOUND)

    family.ask("parent", *PARENT_AGAIN, **same)
    after_the_retry = family.is_demoted("child")
    family.ask("parent", *PARENT_AGAIN, **other)

    assert (after_the_retry, family.is_demoted("child")) == (False, True)


def test_a_request_that_is_aborted_before_it_begins_is_no_return() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    aborted = family.submit("parent", *PARENT_AGAIN)
    family.scheduler.cancel(aborted)

    family.engine.run()

    assert not family.is_demoted("child")


def with_a_parent_in_host() -> Family:
    """The child is on the device and idle for long enough; of the parent's blocks some lie in host memory."""
    family = Family(num_pages=8, num_host_pages=16)
    family.ask("child", *CHILD, parent="parent")
    family.ask("parent", *PARENT)
    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="parent")
    family.press(1)
    family.engine.end_copies()
    family.pass_plans_until_idle("child", BOUND)
    assert family.replica.cache.tree.num_idle[Tier.HOST] > 0
    return family


def test_a_parent_that_is_aborted_while_its_blocks_come_back_did_not_return() -> None:
    family = with_a_parent_in_host()
    aborted = family.submit("parent", *PARENT_AGAIN)
    family.engine.step()
    assert family.engine.work.batch is None
    family.scheduler.cancel(aborted)
    family.engine.step()
    family.engine.end_copies()

    family.engine.run()

    assert not family.is_demoted("child")


def test_a_parent_that_waited_for_its_blocks_returns_with_its_first_chunk() -> None:
    family = with_a_parent_in_host()
    family.submit("parent", *PARENT_AGAIN)
    family.engine.step()
    before_its_first_chunk = family.is_demoted("child")
    family.engine.end_copies()

    family.engine.step()

    assert family.engine.work.batch is not None
    assert (before_its_first_chunk, family.is_demoted("child")) == (False, True)


def test_a_parent_that_made_way_before_its_first_chunk_returns_when_it_is_admitted_again() -> None:
    family = with_a_parent_in_host()
    older = family.submit("older", 6, 0, max_tokens=100)
    family.engine.step()
    family.submit("parent", *PARENT_AGAIN)
    family.engine.step()
    while not family.scheduler.load.queued:
        family.engine.step()
    before_its_first_chunk = family.is_demoted("child")
    family.scheduler.cancel(older)
    family.engine.step()
    family.engine.end_copies()

    family.engine.step()

    assert family.engine.batch_keys() == [family.key]
    assert (before_its_first_chunk, family.is_demoted("child")) == (False, True)


def test_an_abort_after_the_first_chunk_undoes_nothing() -> None:
    family = with_a_child(max_num_tokens=2)
    family.pass_plans_until_idle("child", BOUND)
    aborted = family.submit("parent", *PARENT_AGAIN)
    family.engine.step()
    family.scheduler.cancel(aborted)

    family.engine.run()

    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, LOW, LOW]


def test_a_generation_leg_of_the_parent_is_no_return() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    leg = family.submit("parent", *PARENT_AGAIN, phase=Phase.GENERATION, first_token=5, max_tokens=3)
    family.engine.step()
    family.scheduler.pulled(leg)

    family.engine.run()

    assert not family.is_demoted("child")


def test_a_turn_that_another_worker_served_is_a_return_once() -> None:
    family = with_a_child()
    demoted: list[bool] = []
    for turn in ("7", "7", "8"):
        family.ask("child", *CHILD, parent="parent")
        family.pass_plans_until_idle("child", BOUND)
        family.scheduler.returned("parent", turn)
        family.engine.run()
        demoted.append(family.is_demoted("child"))

    assert demoted == [True, False, True]
    assert family.priorities(*CHILD) == [DEFAULT_PRIORITY, LOW, LOW]


def test_a_turn_of_somebody_without_children_here_changes_nothing() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)

    family.scheduler.returned("somebody", "7")
    family.engine.run()

    assert not any(one.act == "demote" for one in family.replica.decisions)


# Empty plans.


def test_a_worker_with_nothing_to_run_plans_on_until_its_children_are_old_enough() -> None:
    family = with_a_child()
    last = family.known("child").last_context_step
    assert last is not None
    started_ms = family.engine.now_ms
    while (wake_ms := family.scheduler.next_wake_ms) is not None:
        family.engine.now_ms = wake_ms
        assert family.engine.step() == []
        assert family.engine.work.batch is None

    assert family.replica.number == last + BOUND
    assert family.engine.now_ms - started_ms == 30 * (BOUND - 1)
    family.engine.now_ms += 1_000
    assert family.engine.step() is None


def test_an_empty_plan_is_not_made_before_it_is_due() -> None:
    family = with_a_child()
    family.engine.now_ms += 29
    assert family.engine.step() is None

    family.engine.now_ms += 1
    assert family.engine.step() == []


@pytest.mark.parametrize("parent", [None, "parent"])
def test_no_plan_is_made_for_nobody(parent: str | None) -> None:
    """Neither without children, nor where finished ones are not demoted."""
    family = Family(priority=None if parent else LOW)
    family.ask("child", *CHILD, parent=parent)

    assert family.scheduler.next_wake_ms is None


def test_the_decision_log_has_a_line_for_every_stretch_that_is_demoted_or_restored() -> None:
    family = with_a_child()
    family.pass_plans_until_idle("child", BOUND)
    family.ask("parent", *PARENT_AGAIN)
    family.ask("child", *CHILD[:-1], 6, 6, 0, parent="parent")

    log = [(one.act, one.facts[-2:]) for one in family.replica.decisions if one.act in ("demoted", "restored")]

    assert log == [("demoted", (DEFAULT_PRIORITY, LOW)), ("restored", (LOW, DEFAULT_PRIORITY))]
