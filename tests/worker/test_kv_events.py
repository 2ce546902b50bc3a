"""The log of KV events: no batch is left out or told twice, however slow its readers are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from worker.commands import KvSnapshot
from worker.core.events import CacheEvent, Cleared, Removed, Stored, Updated
from worker.core.tiers import Tier
from worker.kv_batches import MAX_BATCH_COST, Batch, SnapshotPart, bytes_of, cost_of
from worker.kv_event_metrics import KvEventMetrics
from worker.kv_events import Behind, EventLog, Follower


def stored(number: int, blocks: int = 1, block_tokens: int = 2) -> Stored:
    keys = b"".join((number + index).to_bytes(32, "little") for index in range(blocks))
    return Stored(b"p" * 32, keys, Tier.DEVICE, np.arange(blocks * block_tokens, dtype=np.int32), True)


class Worker:
    """A log with the engine thread behind it: it answers what it was asked when told to."""

    def __init__(self, max_batches: int = 4, max_bytes: int = 1 << 30) -> None:
        self.asked: list[int] = []
        self.woken = 0
        self.registry = CollectorRegistry()
        self.log = EventLog("epoch", max_batches, self.asked.append, KvEventMetrics(self.registry), max_bytes)

    def wake(self) -> None:
        self.woken += 1

    def follow(self, start: int | None = None) -> Follower:
        return self.log.follow(self.wake, start=start)

    def step(self, *events: CacheEvent) -> None:
        self.log.deliver((), events)

    def answer(self, *held: Stored) -> None:
        """Every snapshot that was asked for, in one delivery."""
        self.log.deliver([KvSnapshot(ticket, held) for ticket in self.asked], ())
        self.asked.clear()


def read_all(follower: Follower) -> list[Batch | SnapshotPart | Behind]:
    read: list[Batch | SnapshotPart | Behind] = []
    while (one := follower.read()) is not None:
        read.append(one)
        if isinstance(one, Behind):
            break
    return read


def numbers(read: list[Batch | SnapshotPart | Behind]) -> list[int]:
    return [one.sequence for one in read if not isinstance(one, Behind)]


def test_batches_are_numbered_from_one_without_gaps_and_steps_without_events_have_none() -> None:
    worker = Worker()
    follower = worker.follow(start=1)
    worker.step(stored(1))
    worker.step()
    worker.step(Cleared())

    read = read_all(follower)
    assert numbers(read) == [1, 2]
    assert worker.woken == 2


def test_who_comes_later_gets_what_is_kept() -> None:
    worker = Worker(max_batches=4)
    for number in range(1, 7):
        worker.step(stored(number))

    assert numbers(read_all(worker.follow(start=3))) == [3, 4, 5, 6]
    assert read_all(worker.follow(start=2)) == [Behind(2, 3)]
    assert read_all(worker.follow(start=7)) == []
    assert read_all(worker.follow(start=8)) == [Behind(8, 3)], "no such batch was ever told"


def test_a_snapshot_comes_before_what_follows_it_and_has_the_number_that_it_holds_after() -> None:
    worker = Worker()
    worker.step(stored(1))
    follower = worker.follow()
    assert worker.asked == [1]
    worker.step(stored(2))
    assert follower.read() is None

    worker.log.deliver([KvSnapshot(1, [stored(1), stored(2)])], [stored(3)])

    part, batch = read_all(follower)
    assert isinstance(part, SnapshotPart)
    assert (part.sequence, part.begin, part.end, len(part.events)) == (2, True, True, 2)
    assert isinstance(batch, Batch)
    assert batch.sequence == 3


def test_a_snapshot_of_nothing_is_one_empty_part() -> None:
    worker = Worker()
    follower = worker.follow()
    worker.answer()

    [part] = read_all(follower)
    assert isinstance(part, SnapshotPart)
    assert (part.sequence, part.begin, part.end, part.events) == (0, True, True, ())


def test_those_who_ask_at_once_share_one_snapshot() -> None:
    worker = Worker()
    followers = [worker.follow() for _ in range(5)]
    assert len(worker.asked) == 1
    worker.answer(stored(1))
    late = worker.follow()

    assert worker.asked == [], "another reads it just now"
    for follower in [*followers, late]:
        assert numbers(read_all(follower)) == [0]
    worker.follow()
    assert len(worker.asked) == 1, "nobody holds it any more"


def test_what_is_kept_and_told_is_counted() -> None:
    worker = Worker(max_batches=2)
    worker.follow()
    worker.answer()
    for number in range(1, 4):
        worker.step(stored(number), Cleared())

    counted = {
        name: worker.registry.get_sample_value(f"kinroute_worker_kv_{name}")
        for name in ("events_total", "event_snapshots_total", "event_batches")
    }
    assert counted == {"events_total": 6, "event_snapshots_total": 1, "event_batches": 2}
    assert worker.registry.get_sample_value("kinroute_worker_kv_event_bytes") == sum(
        bytes_of(batch.events) for number in (2, 3) if (batch := worker.log.batch(number)) is not None
    )


def test_an_answer_to_another_question_is_not_taken_for_it() -> None:
    worker = Worker()
    follower = worker.follow()
    worker.log.deliver([KvSnapshot(99, [stored(1)])], ())

    assert follower.read() is None


def test_who_reads_too_slowly_is_told_and_may_begin_again() -> None:
    worker = Worker(max_batches=2)
    follower = worker.follow(start=1)
    for number in range(1, 5):
        worker.step(stored(number))

    assert follower.read() == Behind(1, 3)
    assert follower.read() == Behind(1, 3)
    follower.restart()
    worker.answer(stored(9))
    assert numbers(read_all(follower)) == [4]


def test_a_log_of_no_batches_is_off() -> None:
    worker = Worker(max_batches=0)
    worker.step(stored(1))

    assert not worker.log.is_on
    assert worker.log.last == 0


@pytest.mark.parametrize(
    "event",
    [stored(1, blocks=40_000, block_tokens=32), Removed(stored(1, blocks=100_000).keys, Tier.HOST)],
    ids=["stored", "removed"],
)
def test_what_is_too_much_for_one_batch_is_told_in_several(event: Stored | Removed) -> None:
    worker = Worker(max_batches=100)
    follower = worker.follow(start=1)
    worker.step(Cleared(), event)

    batches = [one for one in read_all(follower) if isinstance(one, Batch)]
    told = [one for batch in batches for one in batch.events]
    assert len(batches) > 3
    assert numbers(list(batches)) == list(range(1, len(batches) + 1))
    assert all(sum(map(cost_of, batch.events)) <= MAX_BATCH_COST for batch in batches)
    assert isinstance(told[0], Cleared)
    pieces = [one for one in told if isinstance(one, Stored | Removed)]
    assert b"".join(piece.keys for piece in pieces) == event.keys
    if isinstance(event, Stored):
        chain = [piece for piece in pieces if isinstance(piece, Stored)]
        assert [piece.begins for piece in chain] == [True] + [False] * (len(chain) - 1)
        assert all(after.parent == before.keys[-32:] for before, after in itertools.pairwise(chain))
        assert np.concatenate([piece.token_ids for piece in chain]).tolist() == event.token_ids.tolist()


def test_a_log_is_bounded_in_bytes_too() -> None:
    worker = Worker(max_batches=1000, max_bytes=10_000)
    for number in range(100):
        worker.step(stored(number, blocks=10))

    assert worker.log.oldest > 80
    assert worker.log.last == 100


class Readers(RuleBasedStateMachine):
    """Readers at any pace know what the worker holds: each event is a number that is there, or is not any more."""

    max_batches = 3

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker(self.max_batches)
        self.held: set[int] = set()
        self.taken: dict[int, frozenset[int]] = {}
        self.readers: list[tuple[Follower, set[int]]] = []

    def changed(self, number: int) -> CacheEvent:
        one = stored(number)
        if number in self.held:
            self.held.remove(number)
            return Removed(one.keys, Tier.DEVICE)
        self.held.add(number)
        return one

    @rule(changes=st.lists(st.integers(0, 5), max_size=3))
    def steps(self, changes: list[int]) -> None:
        """What was asked for is taken before the step."""
        snapshots = [
            KvSnapshot(ticket, [stored(number) for number in sorted(self.held)]) for ticket in self.worker.asked
        ]
        self.worker.asked.clear()
        self.worker.log.deliver(snapshots, [self.changed(number) for number in changes])

    @rule()
    def comes(self) -> None:
        self.readers.append((self.worker.follow(), set()))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), count=st.integers(1, 6))
    def reads(self, data: st.DataObject, count: int) -> None:
        follower, known = self.readers[data.draw(st.integers(0, len(self.readers) - 1))]
        for _ in range(count):
            read = follower.read()
            if isinstance(read, Behind):
                follower.restart()
            if isinstance(read, SnapshotPart) and read.begin:
                known.clear()
            if isinstance(read, Batch | SnapshotPart):
                for event in read.events:
                    assert isinstance(event, Stored | Removed)
                    number = int.from_bytes(event.keys, "little")
                    (known.add if isinstance(event, Stored) else known.remove)(number)

    @precondition(lambda self: self.readers)
    @rule()
    def leaves(self) -> None:
        self.readers.pop(0)

    @invariant()
    def who_has_read_all_knows_all(self) -> None:
        for follower, known in self.readers:
            if follower._parts is None and not follower._waits and follower._next == self.worker.log.last + 1:
                assert known == self.held

    @invariant()
    def no_more_is_kept_than_asked_for(self) -> None:
        assert len(self.worker.log._batches) <= self.max_batches


Readers.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestReaders = Readers.TestCase


def test_an_update_costs_no_more_than_it_says() -> None:
    assert cost_of(Updated(b"a" * 32, b"b" * 32, 1 << 30, 35, 1)) < 100
