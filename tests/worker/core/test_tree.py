from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.core.trees import BLOCK, SCOPE, Tree, ids
from worker.core.paths import newly_held, path_pages
from worker.core.runs import Hold
from worker.core.tiers import Tier


def test_a_prompt_matches_by_whole_blocks() -> None:
    tree = Tree()
    tree.commit(1, 2, 3, 4, 5, 6)

    assert tree.cached(1, 2, 3, 4, 5, 6, 7, 8) == 3
    assert tree.cached(1, 2, 3, 4, 5, 9) == 2
    assert tree.cached(1, 9, 3, 4) == 0


def test_a_conversation_that_goes_on_lengthens_its_run_in_place() -> None:
    tree = Tree()
    hold = tree.commit(1, 2, 3, 4)
    tree.extend(hold, 5, 6)
    tree.let_go(hold)
    tree.commit(1, 2, 3, 4, 5, 6, 7, 8)

    assert tree.num_runs == 1
    assert tree.cached(1, 2, 3, 4, 5, 6, 7, 8) == 4


def test_a_fork_splits_a_run_at_a_block_boundary_and_both_ends_stay() -> None:
    tree = Tree()
    tree.commit(1, 2, 3, 4, 5, 6)
    tree.commit(1, 2, 3, 4, 7, 8)

    assert tree.num_runs == 3
    assert tree.cached(1, 2, 3, 4, 5, 6) == tree.cached(1, 2, 3, 4, 7, 8) == 3


def test_scopes_share_nothing() -> None:
    tree = Tree()
    tree.commit(1, 2, 3, 4)

    assert tree.cached(1, 2, 3, 4, scope=b"other") == 0


def test_a_scope_without_blocks_and_holds_is_forgotten() -> None:
    tree = Tree()
    hold = tree.hold(1, 2, scope=b"passing")
    assert len(list(tree.tree.runs())) == 1

    tree.let_go(hold)

    assert not list(tree.tree.runs())


def test_blocks_that_somebody_committed_first_are_kept_and_ours_are_free() -> None:
    tree = Tree()
    mine, theirs = tree.hold(1, 2), tree.hold(1, 2)
    tree.extend(theirs, 1, 2, 3, 4, owner="them")

    kept, free = tree.extend(mine, 1, 2, 3, 4, 5, 6, owner="me")

    assert (kept, free) == ([0, 1, 4], [2, 3])
    assert tree.tree.owners.blocks("them") == 2
    assert tree.tree.owners.blocks("me") == 1


def test_the_path_that_was_let_go_first_leaves_first_and_the_other_survives() -> None:
    tree = Tree()
    first, second = tree.commit(1, 1, 2, 2), tree.commit(3, 3, 4, 4)
    tree.let_go(second, first)

    assert tree.evict(2) == [3, 2]

    assert tree.cached(3, 3) == 0
    assert tree.cached(1, 1, 2, 2) == 2


def test_a_path_that_is_used_again_moves_behind_one_that_is_not() -> None:
    tree = Tree()
    first, second = tree.commit(1, 1), tree.commit(2, 2)
    tree.let_go(first, second)
    tree.let_go(tree.hold(1, 1))

    assert tree.evict(1) == [1]
    assert tree.cached(1, 1) == 1


def test_a_run_that_is_uncovered_leaves_by_its_own_stamp_not_as_the_most_recent() -> None:
    tree = Tree()
    trunk = tree.commit(1, 1)
    branch, fork = tree.commit(1, 1, 2, 2), tree.commit(1, 1, 3, 3)
    other = tree.commit(7, 7)
    tree.let_go(trunk, branch, fork, other)

    assert tree.evict(3) == [1, 2, 0]
    assert tree.cached(7, 7) == 1


def test_a_longer_sibling_that_leaves_does_not_take_a_shorter_one_along() -> None:
    tree = Tree()
    shorter, longer = tree.commit(1, 2, 3, 4), tree.commit(1, 2, 3, 4, 5, 6, 7, 8)
    tree.let_go(longer)

    assert tree.evict(10) == [3, 2]

    assert tree.cached(1, 2, 3, 4) == 2
    assert path_pages(shorter).tolist() == [0, 1]


def test_what_a_live_request_holds_is_never_evicted_through_splits_below_it() -> None:
    tree = Tree()
    live = tree.commit(1, 2, 3, 4, 5, 6)
    tree.let_go(tree.commit(1, 2, 9, 9))
    tree.let_go(tree.commit(1, 2, 3, 4, 8, 8))

    assert sorted(tree.evict(10)) == [3, 4]

    assert path_pages(live).tolist() == [0, 1, 2]


def test_evicting_the_last_block_leaves_an_order_that_works_on() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1))
    assert tree.evict(5) == [0]
    assert tree.evict(5) == []
    tree.let_go(tree.commit(2, 2))

    assert tree.evict(1) == [1]
    assert tree.tree.num_idle[Tier.DEVICE] == 0


def test_a_trunk_is_evicted_only_after_its_branches() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2), tree.commit(1, 1, 3, 3))

    evicted = [tree.evict(1), tree.evict(1)]

    assert [0] not in evicted
    assert tree.evict(1) == [0]


def test_an_owner_keeps_what_is_left_of_its_blocks_through_splits_and_trims() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, owner="parent"))
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, 4, 4, owner="child"))
    assert tree.num_runs == 1
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3, 5, 5, owner="sibling"))

    assert [tree.tree.owners.blocks(owner) for owner in ("parent", "child", "sibling")] == [2, 2, 1]
    assert tree.evict(1) == [3]
    assert [tree.tree.owners.blocks(owner) for owner in ("parent", "child", "sibling")] == [2, 1, 1]


def test_a_match_that_ends_inside_a_block_names_the_block_that_shares_most() -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 2), tree.commit(3, 4), tree.commit(3, 5))

    part = tree.part_match(3, 5, 5)

    assert part is not None
    assert (part.run.pages.view[part.index], part.tokens) == (2, 2)
    assert tree.part_match(7, 7) is None
    other = tree.part_match(3, 9, unless=1)
    assert other is not None
    assert (other.run.pages.view[0], other.tokens) == (2, 1)


@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_a_hold_tells_before_it_is_made_how_much_it_will_keep(held: int) -> None:
    tree = Tree()
    tree.let_go(tree.commit(1, 1, 2, 2, 3, 3), tree.commit(1, 1, 2, 2, 4, 4))
    if held:
        tree.hold(*(1, 1, 2, 2, 3, 3)[: held * BLOCK])
    match = tree.tree.match(SCOPE, ids(1, 1, 2, 2, 4, 4), 3)
    idle = tree.tree.num_idle[Tier.DEVICE]

    expected = newly_held(match.run, match.length)
    tree.tree.hold(SCOPE, match)

    assert idle - tree.tree.num_idle[Tier.DEVICE] == expected == 3 - min(held, 2)


Path = tuple[tuple[int, int], ...]
blocks = st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1)]), max_size=6).map(tuple)


@settings(max_examples=400, deadline=None)
@given(
    acts=st.lists(
        st.one_of(
            st.tuples(st.just("commit"), blocks),
            st.tuples(st.just("release"), st.integers(0, 5)),
            st.tuples(st.just("evict"), st.integers(1, 6)),
        ),
        max_size=40,
    )
)
def test_the_tree_holds_what_one_node_per_block_would(acts: list[tuple[str, Path | int]]) -> None:
    """Against a dict from each block's whole path to its page and the moment when it was last let go."""
    tree = Tree()
    pages: dict[Path, int] = {}
    let_go_at: dict[Path, int] = {}
    held: list[tuple[Hold, Path]] = []
    for now, (act, what) in enumerate(acts):
        if act == "commit" and isinstance(what, tuple):
            hold = tree.commit(*(token for block in what for token in block))
            for length in range(1, len(what) + 1):
                if what[:length] not in pages:
                    pages[what[:length]] = tree.pages - len(what) + length - 1
            held.append((hold, what))
        elif act == "release" and held and isinstance(what, int):
            hold, path = held.pop(what % len(held))
            tree.let_go(hold)
            let_go_at |= {path[:length]: now for length in range(1, len(path) + 1)}
        elif act == "evict" and isinstance(what, int):
            kept = {path[:length] for _, path in held for length in range(1, len(path) + 1)}
            assert tree.tree.num_idle[Tier.DEVICE] == len(pages.keys() - kept)
            for page in tree.evict(what):
                gone = next(path for path, other in pages.items() if other == page)
                leaves = [
                    path
                    for path in pages.keys() - kept
                    if not any(other[:-1] == path for other in pages if len(other) == len(path) + 1)
                ]
                assert gone in leaves, "a block left that something needs"
                assert let_go_at[gone] == min(let_go_at[leaf] for leaf in leaves), "a more recent block left first"
                del pages[gone], let_go_at[gone]
        for hold, path in held:
            assert path_pages(hold).tolist() == [pages[path[: at + 1]] for at in range(len(path))]
        assert tree.tree.num_blocks == len(pages)
