"""Three tiers: what moves down and what is dropped, what comes back and how, and what becomes of copies that fail.

Wherever blocks leave, the test names a survivor that an order by last use alone would have taken first.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.core.engines import TestEngine, make_engine
from tests.worker.core.trees import SCOPE, Tree, ids
from worker.core.outputs import Finished, Rejection, Started
from worker.core.paths import path_pages, segments
from worker.core.stats import BELOW_THRESHOLD, CAPACITY, COPY_FAILED, NO_COLDER_TIER, TIER_OFF
from worker.core.tiers import Tier
from worker.core.tree import RunTree
from worker.core.tree_check import check_tree
from worker.core.types import DEFAULT_PRIORITY, FinishReason, RequestKey, Retention, TokenRange

LOW = 1
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


def tiers(tree: RunTree, *tokens: int, scope: bytes = SCOPE) -> list[Tier]:
    """Of each committed block of `tokens`."""
    match = tree.match(scope, ids(*tokens), len(tokens) // 2)
    return [
        segment.run.tier_of(block)
        for segment in segments(match.run, match.length)
        for block in range(segment.start, segment.stop)
    ]


def reasons(tree: Tree) -> dict[str, int]:
    return {reason: count for reason, count in tree.cache.stats.evicted_pages.items() if count}


# Leaving a tier.


def test_blocks_move_down_a_tier_at_a_time_and_are_dropped_behind_the_coldest() -> None:
    tree = Tree(num_host_pages=1, num_disk_pages=1)
    tree.let_go(tree.commit(1, 1), tree.commit(2, 2), tree.commit(3, 3))

    tree.evict(1)
    assert tiers(tree.tree, 1, 1) == [HOST]
    tree.evict(1)
    assert (tiers(tree.tree, 1, 1), tiers(tree.tree, 2, 2)) == ([DISK], [HOST])
    tree.evict(1)

    assert (tiers(tree.tree, 2, 2), tiers(tree.tree, 3, 3)) == ([DISK], [HOST])
    assert tree.cached(1, 1) == 0
    assert reasons(tree) == {NO_COLDER_TIER: 1}


def test_tiers_get_colder_from_the_root_to_the_leaf() -> None:
    tree = Tree(num_host_pages=8)
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, 4, 4))

    tree.evict(2)

    assert tiers(tree.tree, 1, 1, 2, 2, 3, 3, 4, 4) == [DEVICE, DEVICE, HOST, HOST]


def test_a_held_page_of_a_low_priority_is_not_dropped_by_the_threshold() -> None:
    """Everything younger and dearer leaves; it survives, which is first in the order but for its hold."""
    tree = Tree(num_host_pages=4)
    held = tree.commit(1, 1, worth=((0, LOW, 0),))
    tree.let_go(tree.commit(2, 2), tree.commit(3, 3, worth=((0, 90, 0),)))

    tree.evict(3)

    assert tiers(tree.tree, 1, 1) == [DEVICE]
    assert path_pages(held).tolist() == [0]
    assert reasons(tree) == {}
    tree.let_go(held)
    tree.evict(1)
    assert reasons(tree) == {BELOW_THRESHOLD: 1}


def test_an_eviction_of_many_blocks_stops_at_what_a_request_holds_of_their_run() -> None:
    """The held half of the run is the survivor, as old as the half that leaves."""
    tree = Tree(num_pages=5)
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, 4, 4))
    held = tree.hold(1, 1, 2, 2)
    tree.let_go(tree.commit(5, 5))

    assert tree.cache.take(3) is not None

    assert path_pages(held).tolist() == [0, 1]
    assert (tree.cached(1, 1, 2, 2, 3, 3), tree.cached(5, 5)) == (2, 0)


def test_a_held_page_of_a_low_priority_in_host_makes_no_room_for_others() -> None:
    tree = Tree(num_host_pages=1, cold_tier_offload_min_priority=0)
    tree.let_go(tree.commit(1, 1, worth=((0, LOW, 0),)))
    tree.evict(1)
    held = tree.hold(1, 1)
    tree.let_go(tree.commit(2, 2), tree.commit(3, 3))

    tree.evict(1)

    assert tiers(tree.tree, 1, 1) == [HOST]
    assert reasons(tree) == {CAPACITY: 1}
    tree.let_go(held)
    tree.evict(1)
    assert tiers(tree.tree, 3, 3) == [HOST]
    assert tree.cached(1, 1) == 0


def test_a_device_full_of_held_pages_gives_none_and_nothing_changes() -> None:
    tree = Tree(num_pages=2, num_host_pages=4)
    held = tree.commit(1, 1, 2, 2)

    assert tree.cache.take(1) is None

    assert tiers(tree.tree, 1, 1, 2, 2) == [DEVICE, DEVICE]
    tree.let_go(held)
    assert tree.cache.take(1) is not None


def test_what_is_worth_less_than_all_that_fills_the_colder_tier_is_dropped() -> None:
    """The survivor is the older block in host, which is worth more."""
    tree = Tree(num_host_pages=1)
    tree.let_go(tree.commit(1, 1, worth=((0, 80, 0),)))
    tree.evict(1)
    tree.let_go(tree.commit(2, 2))

    tree.evict(1)

    assert tiers(tree.tree, 1, 1) == [HOST]
    assert tree.cached(2, 2) == 0
    assert reasons(tree) == {CAPACITY: 1}


@pytest.mark.parametrize(("disk", "where"), [(0, []), (4, [DISK])])
def test_without_a_host_tier_blocks_go_to_disk_or_nowhere(disk: int, where: list[Tier]) -> None:
    tree = Tree(num_host_pages=0, num_disk_pages=disk)
    tree.let_go(tree.commit(1, 1))

    tree.evict(1)

    assert tiers(tree.tree, 1, 1) == where
    assert reasons(tree) == ({} if disk else {NO_COLDER_TIER: 1})


def test_one_eviction_crosses_priorities_and_drops_moves_and_spares_each_by_its_own() -> None:
    """The survivor is the oldest, of priority 80; its order by last use would be the first."""
    tree = Tree(num_pages=6, num_host_pages=8)
    tree.let_go(tree.commit(1, 1, worth=((0, 80, 0),)))
    tree.let_go(tree.commit(2, 2, 3, 3), tree.commit(4, 4, worth=((0, 20, 0),)), tree.commit(5, 5, worth=((0, 0, 0),)))

    taken = tree.cache.take(5)

    assert taken is not None
    assert (tree.cached(4, 4), tree.cached(5, 5)) == (0, 0)
    assert tiers(tree.tree, 2, 2, 3, 3) == [HOST, HOST]
    assert tiers(tree.tree, 1, 1) == [DEVICE]
    assert reasons(tree) == {BELOW_THRESHOLD: 2}
    check_tree(tree.tree)


def test_a_run_whose_blocks_have_different_priorities_leaves_by_stretches() -> None:
    """The survivor is its own beginning, which is as old, and the older stranger."""
    tree = Tree(num_host_pages=8)
    tree.let_go(tree.commit(9, 9, worth=((0, 40, 0),)))
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, 4, 4, worth=((0, 50, 0), (2, 10, 0))))

    assert tree.evict(2) == [4, 3]

    assert tiers(tree.tree, 1, 1, 2, 2, 3, 3, 4, 4) == [DEVICE, DEVICE]
    assert tiers(tree.tree, 9, 9) == [DEVICE]


# Demotion across tiers.


def half_in_host(*, stranger: bool = False) -> Tree:
    """An old survivor's page 0, and a child's four blocks of which the last two lie in host; `stranger`: so does a
    block of somebody else that goes on from the child's second."""
    tree = Tree(num_host_pages=8)
    survivor = tree.commit(9, 9, owner="survivor")
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, 4, 4, owner="child"))
    if stranger:
        tree.let_go(tree.commit(1, 1, 2, 2, 7, 7, owner="stranger"))
    tree.evict(3 if stranger else 2)
    tree.let_go(survivor)
    tree.let_go(tree.hold(1, 1, 2, 2, 3, 3, 4, 4))
    assert tiers(tree.tree, 1, 1, 2, 2, 3, 3, 4, 4) == [DEVICE, DEVICE, HOST, HOST]
    return tree


def test_a_demoted_prefix_half_in_host_and_half_on_the_device_is_dropped_whole() -> None:
    """The survivor is the older block beside it."""
    tree = half_in_host()
    tree.cache.plan_committed_retention("child").apply(LOW)

    assert tree.evict(2) == [2, 1]

    assert tree.cached(1, 1) == 0
    assert len(tree.cache.pools.free[HOST]) == 8
    assert reasons(tree) == {BELOW_THRESHOLD: 4}
    assert tree.cached(9, 9) == 1


def test_a_demoted_prefix_with_a_strangers_branch_in_host_is_moved_and_never_dropped() -> None:
    """What the stranger goes on from is not demoted, as it extends it; the survivors are it and the branch."""
    tree = half_in_host(stranger=True)
    tree.cache.plan_committed_retention("child").apply(LOW)

    tree.evict(3)

    assert tiers(tree.tree, 1, 1, 2, 2, 7, 7) == [HOST, HOST, HOST]
    assert reasons(tree) == {}


def test_a_prefix_that_was_asked_for_at_a_low_priority_moves_for_the_sake_of_what_hangs_below_it() -> None:
    """Its own priority is under the threshold; its effective one is the branch's, so both survive."""
    tree = Tree(num_host_pages=8)
    tree.let_go(tree.commit(1, 1, 2, 2, worth=((0, LOW, 0),)))
    tree.let_go(tree.commit(1, 1, 2, 2, 7, 7), tree.commit(1, 1, 2, 2, 8, 8, worth=((0, LOW, 0),)))

    tree.evict(4)

    assert tiers(tree.tree, 1, 1, 2, 2, 7, 7) == [HOST, HOST, HOST]
    assert tree.cached(1, 1, 2, 2, 8, 8) == 2
    assert reasons(tree) == {BELOW_THRESHOLD: 1}


def test_a_demoted_page_in_host_leaves_first_and_is_dropped_instead_of_moved_colder() -> None:
    """The survivor lay in host before it; the order by last use would have moved that one to disk."""
    tree = Tree(num_host_pages=2, num_disk_pages=8)
    tree.let_go(tree.commit(9, 9, owner="survivor"), tree.commit(1, 1, owner="child"))
    tree.evict(2)
    tree.cache.plan_committed_retention("child").apply(LOW)
    assert tiers(tree.tree, 1, 1) == [HOST]
    tree.let_go(tree.commit(3, 3))

    tree.evict(1)

    assert tree.cached(1, 1) == 0
    assert tiers(tree.tree, 9, 9) == [HOST]
    assert tiers(tree.tree, 3, 3) == [HOST]
    assert reasons(tree) == {BELOW_THRESHOLD: 1}


# Coming back.


def in_host(engine: TestEngine, prompt: list[int]) -> None:
    """Its blocks have been computed, and have all moved to host."""
    engine.submit(1000, prompt)
    engine.run()
    pages = engine.replica.config.num_pages
    engine.submit(1001, list(range(500, 500 + 2 * pages)), retention=Retention((TokenRange(0, None, 0),), 0))
    settle(engine)
    committed = tiers(engine.replica.cache.tree, *prompt, scope=b"")
    assert committed == [HOST] * len(committed)


def settle(engine: TestEngine) -> list[object]:
    """Steps and ended copies until there is nothing to do; what they told."""
    told: list[object] = list(engine.run())
    while engine.end_copies():
        told += engine.run()
    return told


PROMPT = [1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_loads_go_from_the_root_at_most_so_many_pages_in_a_plan() -> None:
    engine = make_engine(num_pages=8, num_host_pages=16, max_onboard_pages_per_plan=3)
    in_host(engine, PROMPT)
    engine.submit(1, PROMPT)

    engine.step()
    first = tiers(engine.replica.cache.tree, *PROMPT, scope=b"")
    engine.step()

    assert first == [DEVICE, DEVICE, DEVICE, HOST]
    assert tiers(engine.replica.cache.tree, *PROMPT, scope=b"") == [DEVICE] * 4
    assert engine.batch_keys() == []
    told = settle(engine)
    assert Started(RequestKey(1), 8) in told


def test_a_request_computes_nothing_before_all_that_it_waits_for_has_arrived() -> None:
    engine = make_engine(num_pages=8, num_host_pages=16)
    in_host(engine, PROMPT)
    engine.submit(1, PROMPT)
    for _ in range(3):
        engine.step()
        assert engine.work.batch is None
    engine.end_copies()

    engine.step()

    assert engine.computed() == [[5]]


def test_moves_down_are_bounded_in_every_plan() -> None:
    engine = make_engine(num_pages=16, num_host_pages=32, max_offload_pages_per_plan=2, max_num_tokens=8)
    engine.submit(1, list(range(100, 126)))
    engine.run()
    engine.submit(2, list(range(200, 226)))

    while engine.step() is not None:
        engine.end_copies()

    moved = [sum(len(copy.sources) for copy in work.copies if copy.target is HOST) for work in engine.works]
    assert max(moved) == 2
    assert sum(moved) > 2


def test_a_decode_goes_on_while_another_request_waits_for_its_blocks() -> None:
    engine = make_engine(num_pages=12, num_host_pages=16, max_onboard_pages_per_plan=1)
    in_host(engine, PROMPT)
    engine.submit(1, [7], max_tokens=6)
    engine.step()
    engine.submit(2, PROMPT)

    for _ in range(4):
        engine.step()
        assert engine.batch_keys() == [1]

    settle(engine)


# Failures.


@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_failed_load_drops_the_block_and_all_below_and_the_request_computes_from_there(good: int) -> None:
    engine = make_engine(num_pages=8, num_host_pages=16)
    in_host(engine, PROMPT)
    engine.submit(1, PROMPT)
    engine.step()
    engine.end_copies(good)

    engine.step()

    assert engine.computed() == [PROMPT[2 * good :]]
    assert engine.replica.cache.stats.evicted_pages[COPY_FAILED] == 4 - good
    engine.run()


def test_a_block_that_did_not_arrive_in_a_colder_tier_is_lost_with_what_hangs_below_it() -> None:
    engine = make_engine(num_pages=4, num_host_pages=8)
    engine.submit(1, PROMPT[:7])
    engine.run()
    engine.submit(2, [8] * 7)
    engine.step()
    cached = engine.replica.cache.match(b"", np.array(PROMPT, np.int32), 4).blocks

    assert cached == 3
    engine.end_copies(0)
    settle(engine)

    assert tiers(engine.replica.cache.tree, *PROMPT, scope=b"") == []
    assert engine.replica.cache.stats.evicted_pages[COPY_FAILED] == 3


def test_a_tier_that_is_switched_off_loses_its_blocks_and_gets_no_more() -> None:
    """What is on the device survives, and falls to disk from then on, past the host that is off."""
    engine = make_engine(num_pages=8, num_host_pages=16, num_disk_pages=16)
    in_host(engine, PROMPT)
    engine.submit(1, [6, 6, 7, 7, 0])
    settle(engine)

    engine.scheduler.tier_failed(HOST)
    settle(engine)
    engine.submit(2, list(range(300, 316)))
    settle(engine)

    tree = engine.replica.cache.tree
    assert tiers(tree, *PROMPT, scope=b"") == []
    assert tiers(tree, 6, 6, 7, 7, scope=b"") == [DISK, DISK]
    assert engine.replica.cache.stats.evicted_pages[TIER_OFF] > 0
    assert tree.num_idle[HOST] == 0


def test_a_request_that_waits_for_a_tier_that_is_switched_off_computes_its_blocks() -> None:
    engine = make_engine(num_pages=8, num_host_pages=16, max_onboard_pages_per_plan=2)
    in_host(engine, PROMPT)
    engine.submit(1, PROMPT)
    engine.step()

    engine.scheduler.tier_failed(HOST)
    engine.end_copies(0)
    engine.step()

    assert engine.computed() == [PROMPT]


def test_pages_of_a_load_whose_request_was_cancelled_are_free_only_when_the_copy_has_ended() -> None:
    engine = make_engine(num_pages=8, num_host_pages=16)
    in_host(engine, PROMPT)
    engine.submit(1, PROMPT)
    engine.step()
    engine.scheduler.cancel(next(iter(engine.replica.sequences)))
    engine.step()
    while_it_copies = engine.replica.cache.num_in_use

    engine.end_copies()
    engine.step()

    assert (while_it_copies, engine.replica.cache.num_in_use) == (4, 0)
    assert tiers(engine.replica.cache.tree, *PROMPT, scope=b"") == [DEVICE] * 4


# Sizes.


def test_a_request_longer_than_the_device_is_refused_in_a_sentence_however_much_the_colder_tiers_hold() -> None:
    engine = make_engine(num_pages=2, num_host_pages=64, num_disk_pages=64)

    assert engine.submit(1, [1, 2, 3, 4, 5]) == Rejection(
        "INVALID_ARGUMENT", "the prompt has 5 tokens, and this worker's cache holds 4", retryable=False
    )


def test_a_pool_with_one_page_above_a_host_with_one_page_serves_on() -> None:
    engine = make_engine(num_pages=1, num_host_pages=1)
    told: list[object] = []
    for key in range(1, 6):
        engine.submit(key, [key % 2, key % 2], max_tokens=3)
        told += settle(engine)

    assert [one.key for one in told if isinstance(one, Finished)] == [1, 2, 3, 4, 5]
    assert all(one.reason is FinishReason.LENGTH for one in told if isinstance(one, Finished))
    assert engine.replica.cache.num_available == 1


def test_what_moved_down_and_came_back_has_its_owner_and_priority_still() -> None:
    tree = Tree(num_host_pages=4)
    tree.let_go(tree.commit(1, 1, 2, 2, owner="child", worth=((0, 60, 0),)))
    tree.evict(2)

    hold = tree.hold(1, 1, 2, 2)
    assert tree.cache.pools.load(hold, 2)

    assert tiers(tree.tree, 1, 1, 2, 2) == [DEVICE, DEVICE]
    assert tree.tree.owners.blocks("child") == 2
    assert hold.run.stretches.priority_at(1) == 60 != DEFAULT_PRIORITY


def test_no_page_is_copied_for_a_request_whose_path_still_comes_back() -> None:
    """The block to copy is there already: its copy was faster than that of the block before it."""
    engine = make_engine(num_pages=6, num_host_pages=6, enable_partial_reuse=True, max_onboard_pages_per_plan=1)
    engine.submit(1, [1, 1, 2, 2, 3], max_tokens=1)
    engine.run()
    engine.submit(2, [7] * 11, max_tokens=1)
    engine.run()
    engine.end_copies()
    engine.run()
    engine.submit(3, [1, 1, 2, 2, 4], max_tokens=1)
    engine.step()
    engine.step()
    running = engine.replica.cache.pools.copies.running
    first, second = [number for number, copy in running.items() if copy.work.target is DEVICE]
    engine.scheduler.copied(second, 1)
    engine.submit(4, [1, 1, 2, 8], max_tokens=1)

    engine.step()
    assert engine.replica.sequences[RequestKey(4)].loading
    engine.scheduler.copied(first, 1)
    told = engine.run()

    assert {output.key for output in told if isinstance(output, Finished)} == {3, 4}


def test_room_in_a_colder_tier_is_made_at_once_for_all_that_is_to_come() -> None:
    tree = Tree(4, num_host_pages=4, num_disk_pages=8)
    tree.let_go(tree.commit(1, 1, 2, 2), tree.commit(3, 3, 4, 4))
    move_all_down(tree)
    tree.let_go(tree.commit(5, 5), tree.commit(6, 6), tree.commit(7, 7), tree.commit(8, 8))

    move_all_down(tree)

    assert [len(copy.sources) for copy in tree.cache.pools.work if copy.target is Tier.DISK] == [2, 2]
    assert tiers(tree.tree, 8, 8) == [Tier.HOST]


def move_all_down(tree: Tree) -> None:
    """In a plan of its own."""
    tree.begin()
    pages = tree.cache.take(4)
    assert pages is not None
    tree.cache.give(pages)
