"""How long blocks are kept: what a handle demotes and what it leaves alone, ranges, durations and the threshold.

Wherever blocks leave, the test names a survivor that an order by last use alone would have taken first.
"""

from __future__ import annotations

import gc

import pytest

from tests.worker.core.engines import ANSWER, make_engine
from tests.worker.core.trees import SCOPE, Tree, ids
from worker.core.config import ReusePolicy
from worker.core.paths import segments
from worker.core.retention import ChangedStretch
from worker.core.stats import BELOW_THRESHOLD
from worker.core.tiers import Tier
from worker.core.types import DEFAULT_PRIORITY, Retention, TokenRange

LOW = 1


def priorities(tree: Tree, *tokens: int) -> list[int]:
    """Of each committed block of `tokens`."""
    match = tree.tree.match(SCOPE, ids(*tokens), len(tokens) // 2)
    return [
        segment.run.stretches.priority_at(block)
        for segment in segments(match.run, match.length)
        for block in range(segment.start, segment.stop)
    ]


def a_child_of_an_old_parent(tree: Tree) -> None:
    """A stranger's page 0, then the parent's 1 and 2, then the child's 3 and 4 behind 1: all let go in this order."""
    tree.let_go(tree.commit(9, 9, owner="stranger"))
    tree.let_go(tree.commit(1, 1, 2, 2, owner="parent"))
    tree.let_go(tree.commit(1, 1, 3, 3, 4, 4, owner="child"))


def test_committed_retention_handle_demotes_only_owned_blocks() -> None:
    """The survivors are the stranger's block, which is the oldest, and the prefix that the child reused."""
    tree = Tree()
    a_child_of_an_old_parent(tree)

    changed = tree.cache.plan_committed_retention("child").apply(LOW)

    assert [(one.blocks, one.old, one.new) for one in changed] == [(2, DEFAULT_PRIORITY, LOW)]
    assert priorities(tree, 1, 1, 3, 3, 4, 4) == [DEFAULT_PRIORITY, LOW, LOW]
    assert tree.evict(2) == [4, 3]
    assert (tree.cached(9, 9), tree.cached(1, 1, 2, 2)) == (1, 2)


def test_committed_retention_handle_stops_at_a_fork() -> None:
    """The survivors are the stranger's block, which is the oldest, and the child's block that another goes on from."""
    tree = Tree()
    tree.let_go(tree.commit(9, 9, owner="stranger"))
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, owner="child"))
    tree.let_go(tree.commit(1, 1, 7, 7, owner="another"))

    tree.cache.plan_committed_retention("child").apply(LOW)

    assert priorities(tree, 1, 1, 2, 2, 3, 3) == [DEFAULT_PRIORITY, LOW, LOW]
    assert priorities(tree, 1, 1, 7, 7) == [DEFAULT_PRIORITY] * 2
    assert tree.evict(2) == [3, 2]
    assert (tree.cached(9, 9), tree.cached(1, 1, 7, 7)) == (1, 2)


@pytest.mark.parametrize(("applied", "leaves"), [(False, [0, 2]), (True, [4, 3])])
def test_committed_retention_handle_steers_eviction(applied: bool, leaves: list[int]) -> None:
    """Without it the stranger and the parent, both older, leave before the child; with it both survive the child."""
    tree = Tree()
    a_child_of_an_old_parent(tree)
    handle = tree.cache.plan_committed_retention("child")

    if applied:
        handle.apply(LOW)

    assert tree.evict(2) == leaves


def test_a_fork_of_the_same_conversation_does_not_stop_a_handle() -> None:
    """A turn that was edited or asked again is the child's own branch; the oldest block survives both branches."""
    tree = Tree()
    tree.let_go(tree.commit(9, 9, owner="stranger"))
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    tree.let_go(tree.commit(1, 1, 3, 3, owner="child"))

    tree.cache.plan_committed_retention("child").apply(LOW)

    assert tree.evict(3) == [2, 3, 1]
    assert tree.cached(9, 9) == 1


def test_a_branch_of_a_demoted_descendant_does_not_stop_a_handle_and_one_of_a_sibling_does() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, owner="grandchild"))
    tree.let_go(tree.commit(1, 1, 4, 4, owner="sibling"))

    tree.cache.plan_committed_retention("grandchild").apply(LOW)
    tree.cache.plan_committed_retention("child", ("grandchild",)).apply(LOW)

    assert priorities(tree, 1, 1, 2, 2, 3, 3) == [DEFAULT_PRIORITY, LOW, LOW]
    assert priorities(tree, 1, 1, 4, 4) == [DEFAULT_PRIORITY] * 2


def test_a_second_apply_raises_and_changes_nothing() -> None:
    tree = Tree()
    a_child_of_an_old_parent(tree)
    handle = tree.cache.plan_committed_retention("child")
    handle.apply(LOW)

    with pytest.raises(RuntimeError, match="applied once"):
        handle.apply(0)

    assert priorities(tree, 1, 1, 3, 3, 4, 4) == [DEFAULT_PRIORITY, LOW, LOW]


def test_a_handle_that_is_thrown_away_changes_nothing() -> None:
    tree = Tree()
    a_child_of_an_old_parent(tree)
    handle = tree.cache.plan_committed_retention("child")

    del handle
    gc.collect()

    assert priorities(tree, 1, 1, 3, 3, 4, 4) == [DEFAULT_PRIORITY] * 3
    assert tree.evict(1) == [0]


def test_a_handle_skips_blocks_that_died_and_were_computed_again_by_somebody_else() -> None:
    """The survivor is what the other computed: it is as old as the child's block that leaves instead."""
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    handle = tree.cache.plan_committed_retention("child")
    assert tree.evict(1) == [1]
    tree.let_go(tree.commit(1, 1, 2, 2, owner="another"))

    assert handle.apply(LOW) == []

    assert priorities(tree, 1, 1, 2, 2) == [DEFAULT_PRIORITY] * 2


def test_a_handle_skips_everything_where_all_has_died() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    handle = tree.cache.plan_committed_retention("child")
    tree.evict(2)

    assert handle.apply(LOW) == []


def test_a_handle_does_not_cover_what_its_own_conversation_computed_again() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    handle = tree.cache.plan_committed_retention("child")
    tree.evict(2)
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))

    assert handle.apply(LOW) == []


def test_a_handle_skips_what_a_request_holds() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, owner="child"))
    handle = tree.cache.plan_committed_retention("child")
    tree.hold(1, 1, 2, 2)

    handle.apply(LOW)

    assert priorities(tree, 1, 1, 2, 2, 3, 3) == [DEFAULT_PRIORITY, DEFAULT_PRIORITY, LOW]


def test_a_handle_skips_what_was_extended_since() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, owner="child"))
    handle = tree.cache.plan_committed_retention("child")
    tree.let_go(tree.commit(1, 1, 2, 2, 4, 4, owner="another"))

    handle.apply(LOW)

    assert priorities(tree, 1, 1, 2, 2, 3, 3) == [DEFAULT_PRIORITY, DEFAULT_PRIORITY, LOW]


def test_a_handle_does_not_cover_later_commits() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"), tree.commit(5, 5, owner="child"))
    handle = tree.cache.plan_committed_retention("child")
    tree.let_go(tree.commit(1, 1, 7, 7, owner="child"), tree.commit(6, 6, owner="child"))

    handle.apply(LOW)

    assert priorities(tree, 1, 1, 2, 2) == [DEFAULT_PRIORITY, LOW]
    assert priorities(tree, 1, 1, 7, 7) == [DEFAULT_PRIORITY] * 2
    assert (priorities(tree, 5, 5), priorities(tree, 6, 6)) == ([LOW], [DEFAULT_PRIORITY])


def test_demotion_only_lowers() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child", worth=((0, 0, 0), (1, 90, 0))))

    tree.cache.plan_committed_retention("child").apply(5)

    assert priorities(tree, 1, 1, 2, 2) == [0, 5]


def test_each_demotion_plans_afresh_so_a_restored_child_is_demoted_again_with_all_its_turns() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    tree.cache.plan_committed_retention("child").apply(LOW)
    tree.cache.restore("child")
    assert priorities(tree, 1, 1, 2, 2) == [DEFAULT_PRIORITY] * 2
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, owner="child"))

    tree.cache.plan_committed_retention("child").apply(LOW)

    assert priorities(tree, 1, 1, 2, 2, 3, 3) == [LOW] * 3


def test_demoted_blocks_that_another_conversation_extends_have_the_default_priority_again() -> None:
    """Only those on its path: the demoted leaf beside it leaves first, and the older stranger survives it."""
    tree = Tree()
    tree.let_go(tree.commit(9, 9, owner="stranger"))
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    tree.cache.plan_committed_retention("child").apply(LOW)

    tree.let_go(tree.commit(1, 1, 7, 7, owner="another"))

    assert priorities(tree, 1, 1, 2, 2) == [DEFAULT_PRIORITY, LOW]
    assert tree.evict(1) == [2]
    assert tree.cached(9, 9) == 1


@pytest.mark.parametrize(("answer", "after"), [(2, [DEFAULT_PRIORITY, LOW]), (4, [DEFAULT_PRIORITY] * 3)])
def test_demoted_blocks_that_a_running_request_finds_and_extends_have_the_default_priority_again(
    answer: int, after: list[int]
) -> None:
    """Its answer comes to be what a child's prompt was; the child's block is raised where it goes on behind that."""
    engine = make_engine(
        num_pages=16,
        policy=ReusePolicy.PER_CONVERSATION,
        finished_subagent_priority=LOW,
        finished_subagent_min_idle_iterations=0,
    )
    engine.submit(1, [1, 1], max_tokens=answer + 1, conversation="another")
    engine.step()
    engine.submit(2, [1, 1, ANSWER, ANSWER, 8], conversation="child", parent="parent")
    engine.step()
    engine.scheduler.returned("parent", "turn")
    engine.step()
    (run,) = (run for run in engine.replica.cache.tree.runs() if run.parent is not None)
    assert [run.stretches.priority_at(block) for block in range(run.length)] == [DEFAULT_PRIORITY, LOW]

    engine.run()

    assert [run.stretches.priority_at(block) for block in range(run.length)] == after


def test_demoted_blocks_that_are_only_read_stay_demoted() -> None:
    tree = Tree()
    tree.let_go(tree.commit(9, 9, owner="stranger"))
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child"))
    tree.cache.plan_committed_retention("child").apply(LOW)

    tree.let_go(tree.hold(1, 1, 2, 2))

    assert priorities(tree, 1, 1, 2, 2) == [LOW] * 2
    assert tree.evict(1) == [2]


def test_a_changed_priority_of_a_queued_page_queues_it_anew_deepest_first() -> None:
    """It stood last in the order, behind two older ones that both survive it."""
    tree = Tree()
    tree.let_go(tree.commit(8, 8), tree.commit(9, 9), tree.commit(1, 1, 2, 2, 3, 3, owner="child"))

    tree.cache.plan_committed_retention("child").apply(LOW)

    assert tree.evict(3) == [4, 3, 2]
    assert (tree.cached(8, 8), tree.cached(9, 9)) == (1, 1)


def test_a_restored_priority_queues_a_page_anew_at_its_own_place() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, owner="child"), tree.commit(8, 8), tree.commit(9, 9, owner="other child"))
    for child in ("child", "other child"):
        tree.cache.plan_committed_retention(child).apply(LOW)

    tree.cache.restore("child")

    assert tree.evict(3) == [2, 0, 1]


def test_a_demoted_trunk_with_a_branch_that_is_worth_more_leaves_by_the_branchs_priority() -> None:
    """The survivors are the trunk and its branch; the trunk alone has the lowest priority of all."""
    tree = Tree()
    tree.let_go(tree.commit(1, 1, owner="child", worth=((0, LOW, 0),)))
    tree.let_go(tree.commit(1, 1, 2, 2, worth=((0, 80, 0),)), tree.commit(1, 1, 3, 3, worth=((0, LOW, 0),)))
    tree.let_go(tree.commit(9, 9))

    assert tree.evict(4) == [2, 3, 1, 0]


# What requests ask for.


def test_ranges_give_their_blocks_their_priorities_and_the_later_range_wins() -> None:
    engine = make_engine(num_pages=16)
    asked = Retention(ranges=(TokenRange(0, 6, 80), TokenRange(4, None, 10)), decode_priority=50)
    engine.submit(1, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=6, retention=asked)
    engine.run()

    (run,) = (run for run in engine.replica.cache.tree.runs() if run.parent is not None)

    assert [run.stretches.priority_at(block) for block in range(run.length)] == [80, 80, 10, 10, 50, 50]


def test_a_block_goes_by_the_token_that_it_begins_with() -> None:
    engine = make_engine(num_pages=16)
    asked = Retention(ranges=(TokenRange(1, 5, 80),))
    engine.submit(1, [1, 2, 3, 4, 5, 6, 7, 8], retention=asked)
    engine.run()

    (run,) = (run for run in engine.replica.cache.tree.runs() if run.parent is not None)

    assert [run.stretches.priority_at(block) for block in range(run.length)] == [35, 80, 80, 35]


def test_blocks_of_a_higher_priority_survive_younger_ones() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, worth=((0, 80, 0), (1, 35, 0))))
    tree.let_go(tree.commit(3, 3), tree.commit(4, 4, worth=((0, 20, 0),)))

    assert tree.evict(4) == [3, 1, 2, 0]


def test_a_duration_counts_from_the_last_release_in_plan_time() -> None:
    """While it runs, the older block survives a younger one; once it lapsed, the order is by last use again."""
    tree = Tree()
    hold = tree.commit(1, 1, worth=((0, 80, 100),))
    tree.let_go(tree.commit(2, 2, worth=((0, 10, 100),)))
    tree.begin(now_ms=1_000)
    assert priorities(tree, 1, 1) == [80]
    assert priorities(tree, 2, 2) == [DEFAULT_PRIORITY]
    tree.let_go(hold)

    tree.begin(now_ms=1_099)
    assert priorities(tree, 1, 1) == [80]
    assert tree.evict(1) == [1]
    tree.let_go(tree.commit(3, 3))

    tree.begin(now_ms=1_100)
    assert priorities(tree, 1, 1) == [DEFAULT_PRIORITY]
    assert tree.evict(1) == [0]


def test_a_block_that_is_used_again_counts_its_duration_anew() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, worth=((0, 80, 100),)))
    tree.begin(now_ms=90)
    tree.let_go(tree.hold(1, 1))

    tree.begin(now_ms=189)
    assert priorities(tree, 1, 1) == [80]
    tree.begin(now_ms=190)
    assert priorities(tree, 1, 1) == [DEFAULT_PRIORITY]


def test_a_duration_does_not_lapse_while_another_request_still_uses_the_block() -> None:
    """What only the first one used lapses meanwhile; the rest counts from the last release."""
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, worth=((0, 80, 100),)))
    used = tree.hold(1, 1)

    tree.begin(now_ms=150)
    assert priorities(tree, 1, 1, 2, 2) == [80, DEFAULT_PRIORITY]
    tree.let_go(used)
    tree.begin(now_ms=249)
    assert priorities(tree, 1, 1) == [80]
    tree.begin(now_ms=250)
    assert priorities(tree, 1, 1) == [DEFAULT_PRIORITY]


def test_durations_of_both_parts_of_a_split_run_lapse() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, worth=((0, 80, 100),)))
    tree.let_go(tree.commit(1, 1, 9, 9))

    tree.begin(now_ms=100)

    assert priorities(tree, 1, 1, 2, 2, 3, 3) == [DEFAULT_PRIORITY] * 3


def test_a_lapsing_duration_does_not_undo_a_demotion() -> None:
    """The older stranger survives the demoted child after the child's duration is over too."""
    tree = Tree()
    tree.let_go(tree.commit(9, 9), tree.commit(1, 1, owner="child", worth=((0, 80, 100),)))
    tree.cache.plan_committed_retention("child").apply(LOW)

    tree.begin(now_ms=1_000)

    assert priorities(tree, 1, 1) == [LOW]
    assert tree.evict(1) == [1]
    assert tree.cached(9, 9) == 1


def test_a_duration_lapses_alike_at_noon_and_at_night() -> None:
    """The next plan comes hours later: whatever should have lapsed in between has."""
    tree = Tree()
    tree.let_go(tree.commit(1, 1, worth=((0, 80, 100),)), tree.commit(2, 2, worth=((0, 80, 10**9),)))

    tree.begin(now_ms=10**8)

    assert (priorities(tree, 1, 1), priorities(tree, 2, 2)) == ([DEFAULT_PRIORITY], [80])
    assert tree.cache.stats.lapsed_blocks == 1


# The threshold.


@pytest.mark.parametrize(("priority", "moves"), [(29, False), (30, True), (31, True)])
def test_what_leaves_the_device_below_the_threshold_is_dropped_and_at_it_moves_down(priority: int, moves: bool) -> None:
    """The survivor is the older block of priority 40, which the order by last use would have taken first."""
    tree = Tree(num_host_pages=4)
    tree.let_go(tree.commit(9, 9, worth=((0, 40, 0),)), tree.commit(1, 1, worth=((0, priority, 0),)))

    assert tree.evict(1) == [1]

    assert tree.cached(1, 1) == int(moves)
    assert tree.tree.num_idle[Tier.HOST] == int(moves)
    assert tree.cache.stats.evicted_pages[BELOW_THRESHOLD] == int(not moves)
    assert priorities(tree, 9, 9) == [40]


@pytest.mark.parametrize(("applied", "in_host"), [(29, 0), (30, 2), (31, 2)])
def test_a_demoted_prefix_falls_or_moves_by_the_priority_that_it_was_demoted_to(applied: int, in_host: int) -> None:
    tree = Tree(num_host_pages=4)
    tree.let_go(tree.commit(9, 9), tree.commit(1, 1, 2, 2, owner="child"))

    tree.cache.plan_committed_retention("child").apply(applied)
    tree.evict(2)

    assert tree.tree.num_idle[Tier.HOST] == in_host
    assert tree.cached(1, 1, 2, 2) == in_host
    assert tree.cached(9, 9) == 1


def test_each_change_is_told_with_its_old_and_new_priority() -> None:
    tree = Tree()
    hold = tree.commit(1, 1, 2, 2, owner="child", worth=((0, 50, 0), (1, 60, 0)))
    tree.let_go(hold)

    changed = tree.cache.plan_committed_retention("child").apply(LOW)

    number = hold.run.number
    assert changed == [ChangedStretch(number, 0, 1, 50, LOW), ChangedStretch(number, 1, 2, 60, LOW)]
    assert tree.cache.plan_committed_retention("child").apply(LOW) == []


def test_the_policy_that_has_no_owners_demotes_nothing() -> None:
    engine = make_engine(policy=ReusePolicy.ALL_REUSABLE)
    engine.submit(1, [1, 2, 3, 4], conversation="child", parent="parent")
    engine.run()

    assert engine.replica.cache.plan_committed_retention("child").apply(LOW) == []
