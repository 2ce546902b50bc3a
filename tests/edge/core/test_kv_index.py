"""What is known of workers' caches, through lost batches, lost links and restarts."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge.core.kv_index import (
    MIN_BLOCKS,
    REPAIR_EVERY_BATCHES,
    Change,
    KvBatch,
    KvIndex,
    Removed,
    Resume,
    Stored,
    least_bytes,
)
from edge.core.resident import Held, prints_of
from edge.core.types import WorkerId
from tests.edge.core.kv_caches import ModelCache, key_of, keys_of

WORKER, OTHER = WorkerId("a:1"), WorkerId("b:1")
ONE_TWO = prints_of(keys_of([1, 2]))


def stored(path: list[int], start: int = 0, tier: Held = Held.DEVICE) -> Stored:
    return Stored(key_of(path[:start]), keys_of(path, start), tier, not start)


def snapshot(epoch: str, sequence: int, *changes: Change) -> KvBatch:
    return KvBatch(epoch, sequence, changes, snapshot=True, begin=True, end=True)


def make_index(*held: Change, epoch: str = "e1") -> KvIndex:
    """Follows WORKER; its snapshot held `held` after batch 5."""
    index = KvIndex(2)
    index.connected(WORKER, epoch)
    assert index.feed(WORKER, snapshot(epoch, 5, *held))
    return index


def test_nothing_is_known_of_a_worker_before_its_first_snapshot_is_whole() -> None:
    index = KvIndex(2)
    assert index.known_blocks(WORKER, ONE_TWO) is None
    assert index.connected(WORKER, "e1") == Resume("e1", 0, snapshot=True)
    assert index.known_blocks(WORKER, ONE_TWO) is None

    index.feed(WORKER, KvBatch("e1", 5, [stored([1])], snapshot=True, begin=True))
    assert index.known_blocks(WORKER, ONE_TWO) is None
    index.feed(WORKER, KvBatch("e1", 5, [stored([1, 2], 1)], snapshot=True, end=True))
    assert index.known_blocks(WORKER, ONE_TWO) == 2


def test_batches_change_what_is_known() -> None:
    index = make_index(stored([1]))

    assert index.feed(WORKER, KvBatch("e1", 6, [stored([1, 2], 1)]))
    assert index.known_blocks(WORKER, ONE_TWO) == 2
    assert index.feed(WORKER, KvBatch("e1", 7, [Removed(keys_of([1, 2], 1), Held.DEVICE)]))
    assert index.known_blocks(WORKER, ONE_TWO) == 1


def test_a_gap_asks_for_a_snapshot_once_and_nothing_is_known_until_it_comes() -> None:
    index = make_index(stored([1, 2]))

    assert not index.feed(WORKER, KvBatch("e1", 7, []))
    assert index.known_blocks(WORKER, ONE_TWO) is None
    assert index.feed(WORKER, KvBatch("e1", 8, [])), "it has been asked for"
    assert index.feed(WORKER, snapshot("e1", 8, stored([1])))
    assert index.known_blocks(WORKER, ONE_TWO) == 1
    assert index.workers[WORKER].gaps == 1


def test_a_worker_that_started_again_leaves_no_ghosts() -> None:
    index = make_index(stored([1, 2]))
    index.lost(WORKER)

    assert index.connected(WORKER, "e2") == Resume("e2", 0, snapshot=True)
    assert index.known_blocks(WORKER, ONE_TWO) is None
    assert not len(index.workers[WORKER].blocks)


def test_a_batch_of_another_start_empties_too() -> None:
    index = make_index(stored([1, 2]))

    assert not index.feed(WORKER, KvBatch("e2", 6, []))
    assert index.known_blocks(WORKER, ONE_TWO) is None
    assert not len(index.workers[WORKER].blocks)


def test_while_a_link_is_down_nothing_is_known_and_then_it_goes_on_from_where_it_was() -> None:
    index = make_index(stored([1, 2]))
    index.lost(WORKER)

    assert index.known_blocks(WORKER, ONE_TWO) is None
    assert index.connected(WORKER, "e1") == Resume("e1", 5, snapshot=False)
    assert index.known_blocks(WORKER, ONE_TWO) == 2
    assert index.feed(WORKER, KvBatch("e1", 6, []))


def test_a_link_that_is_lost_amid_a_snapshot_begins_with_another() -> None:
    index = make_index(stored([1, 2]))
    index.feed(WORKER, KvBatch("e1", 9, [stored([1])], snapshot=True, begin=True))
    index.lost(WORKER)

    assert index.connected(WORKER, "e1").snapshot


def test_an_unknown_parent_asks_for_a_snapshot_but_not_again_and_again() -> None:
    index = make_index(stored([1]))

    assert not index.feed(WORKER, KvBatch("e1", 6, [stored([1, 2, 3], 2)]))
    assert index.known_blocks(WORKER, prints_of(keys_of([1]))) == 1
    for number in range(7, 6 + REPAIR_EVERY_BATCHES):
        assert index.feed(WORKER, KvBatch("e1", number, [stored([7, number % 9, number % 8], 2)]))
    assert not index.feed(WORKER, KvBatch("e1", 6 + REPAIR_EVERY_BATCHES, [stored([7, 8, 9], 2)]))
    assert index.workers[WORKER].unknown_parents == REPAIR_EVERY_BATCHES + 1


def test_a_gap_while_a_parent_is_looked_for_is_a_gap() -> None:
    index = make_index(stored([1]))
    index.feed(WORKER, KvBatch("e1", 6, [stored([1, 2, 3], 2)]))

    index.feed(WORKER, KvBatch("e1", 8, []))
    assert index.known_blocks(WORKER, ONE_TWO) is None


def test_a_part_of_another_snapshot_is_a_gap() -> None:
    index = KvIndex(1)
    index.connected(WORKER, "e1")
    index.feed(WORKER, KvBatch("e1", 5, [], snapshot=True, begin=True))

    assert not index.feed(WORKER, KvBatch("e1", 6, [stored([1])], snapshot=True, end=True))
    assert index.known_blocks(WORKER, ONE_TWO) is None


def test_workers_are_known_apart() -> None:
    index = make_index(stored([1, 2]))
    index.connected(OTHER, "o1")
    index.feed(OTHER, snapshot("o1", 1, stored([1])))

    assert index.known_blocks(WORKER, ONE_TWO) == 2
    assert index.known_blocks(OTHER, ONE_TWO) == 1


def test_an_index_that_is_full_thins_the_worker_that_fills_it_and_no_other() -> None:
    index = KvIndex(2, least_bytes(2))
    for worker in (WORKER, OTHER):
        index.connected(worker, "e1")
        index.feed(worker, snapshot("e1", 5, stored([1, 2])))
    for number in range(3 * MIN_BLOCKS // 100):
        index.feed(WORKER, KvBatch("e1", 6 + number, [stored([9, number, *range(98)])]))

    full, other = index.workers[WORKER].blocks, index.workers[OTHER].blocks
    assert len(full) <= MIN_BLOCKS
    assert (full.level > 0, other.level) == (True, 0)
    assert index.known_blocks(WORKER, prints_of(keys_of([9, 50, *range(98)]))) == 100, "whole runs are still found"
    assert index.known_blocks(WORKER, ONE_TWO) == index.known_blocks(OTHER, ONE_TWO) == 2


def test_a_snapshot_of_a_worker_that_holds_less_again_is_kept_whole() -> None:
    index = KvIndex(1, least_bytes(1))
    index.connected(WORKER, "e1")
    index.feed(WORKER, snapshot("e1", 5, *(stored([number, *range(99)]) for number in range(60))))
    assert index.workers[WORKER].blocks.level > 0

    index.feed(WORKER, snapshot("e1", 9, stored([1, 2])))
    assert index.workers[WORKER].blocks.level == 0


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


class LostAndFound(RuleBasedStateMachine):
    """A worker with the last four batches, a link that loses some, breaks and comes back, and restarts."""

    kept = 4

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex(1)
        self.model, self.epoch, self.number = ModelCache(), 1, 0
        self.log: deque[KvBatch] = deque(maxlen=self.kept)
        self.on_the_way: deque[KvBatch] = deque()
        self.linked = False
        self.lost_any = False

    def told(self, changes: list[Change]) -> None:
        if changes:
            self.number += 1
            batch = KvBatch(f"e{self.epoch}", self.number, changes)
            self.log.append(batch)
            if self.linked:
                self.on_the_way.append(batch)

    def subscribe(self, resume: Resume) -> None:
        """As a worker answers it."""
        missing = [batch for batch in self.log if batch.sequence > resume.sequence]
        if not resume.snapshot and resume.sequence + len(missing) == self.number:
            self.on_the_way += missing
            return
        held = self.model.snapshot()
        half = len(held) // 2
        epoch, number = f"e{self.epoch}", self.number
        self.on_the_way.append(KvBatch(epoch, number, held[:half], snapshot=True, begin=True))
        self.on_the_way.append(KvBatch(epoch, number, held[half:], snapshot=True, end=True))

    @precondition(lambda self: not self.linked)
    @rule()
    def links(self) -> None:
        self.linked = True
        self.subscribe(self.index.connected(WORKER, f"e{self.epoch}"))

    @precondition(lambda self: self.linked)
    @rule()
    def breaks(self) -> None:
        self.linked = False
        self.on_the_way.clear()
        self.index.lost(WORKER)

    @rule()
    def restarts(self) -> None:
        if self.linked:
            self.breaks()
        self.model, self.epoch, self.number = ModelCache(), self.epoch + 1, 0
        self.log.clear()

    @rule(path=paths)
    def stores(self, path: tuple[int, ...]) -> None:
        self.told(self.model.store(path))

    @precondition(lambda self: self.model.tiers)
    @rule(data=st.data())
    def drops(self, data: st.DataObject) -> None:
        self.told(self.model.drop(data.draw(st.sampled_from(sorted(self.model.tiers)))))

    @precondition(lambda self: self.model.tiers)
    @rule(data=st.data())
    def cools(self, data: st.DataObject) -> None:
        self.told(self.model.cool(data.draw(st.sampled_from(sorted(self.model.tiers))), Held.HOST))

    @rule()
    def clears(self) -> None:
        self.told(self.model.clear())

    @precondition(lambda self: self.on_the_way)
    @rule()
    def arrives(self) -> None:
        batch = self.on_the_way.popleft()
        if not self.index.feed(WORKER, batch):
            self.subscribe(Resume(batch.epoch, batch.sequence, snapshot=True))

    @precondition(lambda self: self.on_the_way)
    @rule()
    def is_lost_on_the_way(self) -> None:
        self.on_the_way.popleft()
        self.lost_any = True

    @rule(path=paths)
    def asks(self, path: tuple[int, ...]) -> None:
        found = self.index.known_blocks(WORKER, prints_of(keys_of(path)))
        assert found is None or self.linked
        worker = self.index.workers.get(WORKER)
        if found is not None and worker is not None and worker.sequence == self.number:
            assert found == self.model.longest(path)

    @invariant()
    def what_has_all_arrived_is_known(self) -> None:
        if self.linked and not self.on_the_way and not self.lost_any:
            assert self.index.is_known(WORKER)

    @invariant()
    def nothing_is_known_of_an_earlier_start(self) -> None:
        worker = self.index.workers.get(WORKER)
        assert worker is None or not worker.is_up or worker.epoch == f"e{self.epoch}"


LostAndFound.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLostAndFound = LostAndFound.TestCase
