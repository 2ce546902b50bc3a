"""Which blocks a worker holds, against a set; thinned out, never more than that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge.core.kv_index import Change, Cleared, Removed, Stored
from edge.core.resident import BLOCK_BYTES, Held, ResidentBlocks, prints_of
from tests.edge.core.kv_caches import SCOPE, ModelCache, key_of, keys_of

paths = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
ROOM = 1 << 20


def random_keys(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(32 * count)


def apply(blocks: ResidentBlocks, changes: list[Change]) -> None:
    for change in changes:
        match change:
            case Stored():
                assert blocks.stored(change.parent, change.keys, change.tier, begins=change.begins)
            case Removed():
                blocks.removed(change.keys, change.tier)
            case Cleared():
                blocks.clear()


def test_a_prompt_is_found_as_far_as_it_is_there() -> None:
    blocks = ResidentBlocks(ROOM)
    blocks.stored(SCOPE, keys_of([1, 2, 3]), Held.DEVICE, begins=True)

    assert blocks.longest(prints_of(keys_of([1, 2, 3, 4]))) == 3
    assert blocks.longest(prints_of(keys_of([1, 2]))) == 2
    assert blocks.longest(prints_of(keys_of([1, 5, 3]))) == 1
    assert blocks.longest(prints_of(keys_of([5]))) == 0


def test_a_block_is_gone_only_when_it_has_left_every_tier() -> None:
    blocks = ResidentBlocks(ROOM)
    blocks.stored(SCOPE, keys_of([1, 2]), Held.DEVICE, begins=True)
    blocks.stored(SCOPE, keys_of([1, 2]), Held.HOST, begins=True)
    prints = prints_of(keys_of([1, 2]))

    blocks.removed(keys_of([1, 2], 1), Held.DEVICE)
    assert blocks.longest(prints) == 2
    assert blocks.longest(prints, Held.DEVICE) == 1
    blocks.removed(keys_of([1, 2], 1), Held.HOST)
    assert blocks.longest(prints) == 1


def test_blocks_behind_an_unknown_one_are_kept_and_told_of() -> None:
    blocks = ResidentBlocks(ROOM)

    assert not blocks.stored(key_of([1]), keys_of([1, 2], 1), Held.DEVICE, begins=False)
    assert blocks.stored(SCOPE, keys_of([1]), Held.DEVICE, begins=True)
    assert blocks.longest(prints_of(keys_of([1, 2]))) == 2


@pytest.mark.parametrize("at_once", [1, 40, 5000])
def test_what_was_removed_is_not_there_and_takes_no_memory(at_once: int) -> None:
    blocks, keys = ResidentBlocks(ROOM), random_keys(20_000)
    for start in range(0, 20_000, at_once):
        part = keys[32 * start : 32 * (start + at_once)]
        blocks.stored(SCOPE, part, Held.DEVICE, begins=True)
    assert len(blocks) == 20_000
    for start in range(20_000 - at_once, -1, -at_once):
        blocks.removed(keys[32 * start : 32 * (start + at_once)], Held.DEVICE)

    assert len(blocks) == 0
    assert blocks.longest(prints_of(keys)) == 0
    assert blocks.num_bytes < 20_000


def test_more_blocks_than_the_bound_take_no_more_memory_and_whole_runs_are_still_found() -> None:
    blocks = ResidentBlocks(10_000)
    runs = [random_keys(100, seed) for seed in range(2_000)]
    for keys in runs:
        blocks.stored(SCOPE, keys, Held.DEVICE, begins=True)

    assert blocks.num_bytes <= BLOCK_BYTES * 10_000
    assert all(blocks.longest(prints_of(keys)) == 100 for keys in runs)
    halves = [blocks.longest(prints_of(keys[: 32 * 50] + random_keys(50, 9_999))) for keys in runs]
    assert max(halves) <= 50
    assert sum(halves) / len(halves) > 50 - 2 * (1 << blocks.level)


def test_a_fork_is_found_exactly_once_it_has_been_seen() -> None:
    blocks = ResidentBlocks(10_000)
    for seed in range(1_000):
        blocks.stored(SCOPE, random_keys(100, seed), Held.DEVICE, begins=True)
    assert blocks.level
    shared = random_keys(100, 5)[: 32 * 37]
    blocks.stored(shared[-32:], random_keys(10, 7_777), Held.DEVICE, begins=False)

    assert blocks.longest(prints_of(shared + random_keys(50, 8_888))) == 37


def test_a_thousand_workers_of_a_hundred_thousand_runs_take_less_than_five_gigabytes() -> None:
    """A ten-thousandth of that is tried. An object a run would take ten, and one a block a hundred times that."""
    blocks, draw = ResidentBlocks(43_000), np.random.default_rng(3)
    for blocks_of_run in draw.choice([4, 20, 20, 60, 360], 10_000):
        blocks.stored(SCOPE, draw.bytes(32 * int(blocks_of_run)), Held.DEVICE, begins=True)

    assert blocks.num_bytes + 100 * len(blocks._new) < 500_000


class AgainstASet(RuleBasedStateMachine):
    """The cache of `ModelCache`, followed exactly. `room` of few blocks: with as little as it may remember."""

    room = ROOM

    def __init__(self) -> None:
        super().__init__()
        self.model, self.blocks = ModelCache(), ResidentBlocks(self.room)

    @rule(path=paths)
    def stores(self, path: tuple[int, ...]) -> None:
        apply(self.blocks, self.model.store(path))

    @precondition(lambda self: self.model.tiers)
    @rule(data=st.data())
    def drops(self, data: st.DataObject) -> None:
        apply(self.blocks, self.model.drop(data.draw(st.sampled_from(sorted(self.model.tiers)))))

    @precondition(lambda self: self.model.tiers)
    @rule(data=st.data(), tier=st.sampled_from([Held.HOST, Held.DISK]))
    def cools(self, data: st.DataObject, tier: Held) -> None:
        apply(self.blocks, self.model.cool(data.draw(st.sampled_from(sorted(self.model.tiers))), tier))

    @precondition(lambda self: self.model.tiers)
    @rule(data=st.data())
    def warms(self, data: st.DataObject) -> None:
        apply(self.blocks, self.model.warm(data.draw(st.sampled_from(sorted(self.model.tiers)))))

    @rule()
    def clears(self) -> None:
        apply(self.blocks, self.model.clear())

    @rule()
    def merges(self) -> None:
        self.blocks._merge()

    @rule(path=paths)
    def asks(self, path: tuple[int, ...]) -> None:
        assert self.blocks.longest(prints_of(keys_of(path))) == self.model.longest(path)

    @invariant()
    def as_many_blocks(self) -> None:
        assert len(self.blocks) == len(self.model.tiers)


class ThinnedOut(AgainstASet):
    room = 6

    @rule(path=paths)
    def asks(self, path: tuple[int, ...]) -> None:
        assert self.blocks.longest(prints_of(keys_of(path))) <= self.model.longest(path)

    @invariant()
    def as_many_blocks(self) -> None:
        """It may come to know of a fork without being told of the block itself."""
        assert self.blocks.num_bytes <= BLOCK_BYTES * self.room


AgainstASet.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
ThinnedOut.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAgainstASet = AgainstASet.TestCase
TestThinnedOut = ThinnedOut.TestCase
