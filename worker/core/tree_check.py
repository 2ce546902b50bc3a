"""Every promise of the run tree, checked by walking everything."""

from __future__ import annotations

from worker.core.runs import Run
from worker.core.tiers import Tier
from worker.core.tree import RunTree


def check_tree(tree: RunTree) -> None:
    """Raises AssertionError at the first promise that does not hold."""
    blocks = 0
    idle = [0] * len(Tier)
    for run in tree.runs():
        blocks += run.length
        _check_run(tree, run)
        idle = [total + run.idle(tier) for total, tier in zip(idle, Tier, strict=True)]
    assert blocks == tree.num_blocks, "blocks are counted wrongly"
    assert idle == tree.num_idle, "idle blocks are summed wrongly"
    tree.owners.check(run for run in tree.runs() if run.parent is not None)


def _check_run(tree: RunTree, run: Run) -> None:
    assert len(run.tokens) == run.length * tree.block_bytes, "tokens and pages differ in length"
    _check_holds(run)
    _check_children(run)
    assert run.ends[-1] == run.length, "blocks in no tier"
    assert sorted(run.ends) == run.ends, "tiers that get warmer along a run"
    for tier in Tier:
        if run.is_evictable(tier):
            assert run in tree.orders[tier], "idle blocks that no eviction would find, or not by their priority"
    if run.parent is None:
        assert tree.root(run.scope) is run, "a root that no scope names"
        assert run.length == 0, "a root with blocks"
        assert run.children or run.holds, "a root that nothing needs"
        return
    assert run.length, "an empty run"
    assert run.start == run.parent.start + run.parent.length, "a run that does not begin where its parent ends"
    assert run.parent.children[bytes(run.tokens[: tree.block_bytes])] is run, "a run that its parent disowns"
    warmest = max((tier for tier in Tier if run.parent.span(tier)[0] < run.parent.span(tier)[1]), default=Tier.DEVICE)
    assert run.first_tier >= warmest, "a block warmer than the one above it"
    assert len(run.keys) == 32 * run.length, "blocks without keys"
    assert all(start < stop for start, stop, _ in run.stretches.of_length(run.length)), "an empty stretch"


def _check_holds(run: Run) -> None:
    assert run.held_children == sum(child.is_held for child in run.children.values()), "held children are miscounted"
    held = run.length if run.held_children else max((hold.length for hold in run.holds), default=0)
    assert run.held_length == held, "held blocks are counted wrongly"
    assert all(hold.run is run and hold.length <= run.length for hold in run.holds), "a hold past its run's end"


def _check_children(run: Run) -> None:
    tiers = [child.first_tier for child in run.children.values()]
    assert run.first_tiers == [tiers.count(tier) for tier in Tier], "children's tiers are counted wrongly"
    assert run.newest is next(reversed(run.children.values()), None), "another child is called the newest"
    tops = [child.top for child in run.children.values()]
    assert run.below == {top: tops.count(top) for top in set(tops)}, "children's priorities are counted wrongly"
    if run.parent is not None:
        assert run.top == max([run.stretches.top(), *tops]), "a wrong highest priority"
