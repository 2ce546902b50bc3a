"""Copies between the tiers of a rank: byte for byte, in order, each ended once, whatever the disk does."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from worker.core.tiers import CopyEnded, CopyWork, Tier
from worker.memory.device import DevicePool
from worker.memory.disk import Bytes, DiskError, DiskFile
from worker.memory.host import HostPool
from worker.memory.layout import KvLayout
from worker.memory.mover import Mover

CPU = torch.device("cpu")
LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=2, head_dim=8, tokens_per_block=4, dtype="float32", head_start=0, head_stop=2
)
DEVICE_PAGES, HOST_PAGES, DISK_PAGES = 8, 6, 10
DEADLINE_S = 5.0


class Rank:
    """Pages of three tiers, and what the mover says."""

    def __init__(
        self, folder: Path, disk: DiskFile | None = None, deadline_s: float = DEADLINE_S, mover: type[Mover] = Mover
    ) -> None:
        self.pool = DevicePool(LAYOUT, DEVICE_PAGES, CPU)
        self.host = HostPool(LAYOUT, HOST_PAGES, CPU)
        self.disk = disk or DiskFile(folder, DISK_PAGES, LAYOUT.page_bytes)
        self.ended: queue.SimpleQueue[CopyEnded] = queue.SimpleQueue()
        self.mover = mover(self.pool, self.host, self.disk, self.ended.put, deadline_s=deadline_s)
        self.pages = self.pool.tensor.view(DEVICE_PAGES, -1)
        self._number = 0

    def fill(self, page: int, value: float) -> None:
        self.pages[page] = torch.arange(self.pages.shape[1]) + value

    def holds(self, page: int, value: float) -> bool:
        return bool(torch.equal(self.pages[page], torch.arange(self.pages.shape[1]) + value))

    def submit(self, source: Tier, target: Tier, sources: Sequence[int], targets: Sequence[int]) -> int:
        self._number += 1
        work = CopyWork(self._number, source, target, np.array(sources, np.int32), np.array(targets, np.int32))
        self.mover.submit([work])
        return self._number

    def next_ended(self) -> CopyEnded:
        return self.ended.get(timeout=4 * DEADLINE_S)

    def move(self, source: Tier, target: Tier, sources: Sequence[int], targets: Sequence[int]) -> CopyEnded:
        self.submit(source, target, sources, targets)
        return self.next_ended()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.mover.close()


class Stalls(DiskFile):
    """Its reads, or writes, wait until `go` is set."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder, DISK_PAGES, LAYOUT.page_bytes)
        self.kind = kind
        self.go = threading.Event()
        self.waits = threading.Event()
        self.done = threading.Event()

    def _stall(self, kind: str) -> None:
        if kind == self.kind:
            self.waits.set()
            assert self.go.wait(4 * DEADLINE_S)

    def write(self, page: int, content: Bytes) -> None:
        self._stall("write")
        super().write(page, content)
        self.done.set()

    def read(self, page: int, into: Bytes) -> None:
        self._stall("read")
        super().read(page, into)
        self.done.set()


class Fails(DiskFile):
    """Takes no page from number 2 on, in one way or another."""

    def __init__(self, folder: Path, error: Exception) -> None:
        super().__init__(folder, DISK_PAGES, LAYOUT.page_bytes)
        self.error = error

    def write(self, page: int, content: Bytes) -> None:
        if page >= 2:
            raise self.error
        super().write(page, content)


class FailsOnce(DiskFile):
    """Once it `fails`, takes page 2 no more."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, DISK_PAGES, LAYOUT.page_bytes)
        self.fails = False

    def write(self, page: int, content: Bytes) -> None:
        if self.fails and page == 2:
            raise DiskError("no room")
        super().write(page, content)


class LateMover(Mover):
    """Begins no copy before `go` is set."""

    def __init__(self, *parts: Any, deadline_s: float) -> None:
        self.go = threading.Event()
        self.go.set()
        super().__init__(*parts, deadline_s=deadline_s)

    def _begin(self, copy: Any) -> None:
        assert self.go.wait(4 * DEADLINE_S)
        super()._begin(copy)


class StuckMover(Mover):
    """Its memory thread touches no page before `go` is set."""

    def __init__(self, *parts: Any, deadline_s: float) -> None:
        self.go = threading.Event()
        self.stuck = threading.Event()
        super().__init__(*parts, deadline_s=deadline_s)

    def _transfer(self, *what: Any) -> None:
        self.stuck.set()
        assert self.go.wait(4 * DEADLINE_S)
        super()._transfer(*what)


@pytest.mark.parametrize("way", [[Tier.HOST], [Tier.DISK], [Tier.HOST, Tier.DISK]])
def test_pages_come_back_from_every_tier_as_they_were(rank: Rank, way: list[Tier]) -> None:
    for page in range(4):
        rank.fill(page, 10.0 * page)
    pages, source = [0, 1, 2, 3], Tier.DEVICE

    for target in [*way, Tier.DEVICE]:
        targets = [5, 4, 2, 3] if target is not Tier.DEVICE else [6, 7, 0, 1]
        assert rank.move(source, target, pages, targets).good == 4
        pages, source = targets, target
        if target is not Tier.DEVICE:
            rank.pages.zero_()

    assert [rank.holds(page, 10.0 * index) for index, page in enumerate(pages)] == [True] * 4


def test_copies_that_share_a_page_happen_in_the_order_in_which_they_were_asked_for(rank: Rank) -> None:
    """A page of the host goes to the disk and is filled anew at once."""
    rank.fill(0, 1.0)
    rank.fill(1, 2.0)

    rank.submit(Tier.DEVICE, Tier.HOST, [0], [3])
    rank.submit(Tier.HOST, Tier.DISK, [3], [7])
    rank.submit(Tier.DEVICE, Tier.HOST, [1], [3])
    rank.submit(Tier.HOST, Tier.DEVICE, [3], [4])
    rank.submit(Tier.DISK, Tier.DEVICE, [7], [5])

    assert sorted(rank.next_ended().number for _ in range(5)) == [1, 2, 3, 4, 5]
    assert rank.holds(4, 2.0)
    assert rank.holds(5, 1.0)


def test_a_page_is_written_again_only_behind_the_copies_that_read_it(rank: Rank) -> None:
    for number in range(200):
        rank.fill(2, float(number))
        rank.submit(Tier.DEVICE, Tier.HOST, [2], [number % HOST_PAGES])

        rank.mover.wait_for(np.array([2], np.int32))
        rank.fill(2, -1.0)

        rank.submit(Tier.HOST, Tier.DEVICE, [number % HOST_PAGES], [3])
        assert [rank.next_ended().good for _ in range(2)] == [1, 1]
        assert rank.holds(3, float(number))


def test_a_page_that_never_arrived_on_the_host_goes_nowhere(rank: Rank) -> None:
    rank.fill(0, 1.0)
    rank.move(Tier.DEVICE, Tier.HOST, [0], [0])

    ended = rank.move(Tier.HOST, Tier.DEVICE, [0, 1], [4, 5])

    assert (ended.good, ended.why) == (1, "page 1 of the host never arrived there")
    assert rank.holds(4, 1.0)


@pytest.mark.parametrize("error", [DiskError("no room"), ValueError("unheard of")])
def test_a_write_that_fails_ends_its_copy_and_no_other(tmp_path: Path, error: Exception) -> None:
    rank = Rank(tmp_path, Fails(tmp_path, error))
    rank.fill(0, 1.0)

    failed = rank.move(Tier.DEVICE, Tier.DISK, [0, 0, 0], [1, 2, 3])
    well = rank.move(Tier.DEVICE, Tier.DISK, [0], [0])

    assert failed.good == (1 if isinstance(error, DiskError) else 0)
    assert str(error) in failed.why
    assert (well.good, well.why) == (1, "")
    rank.mover.close()


def test_a_read_that_stalls_fails_at_its_deadline_and_touches_nothing_later(tmp_path: Path) -> None:
    disk = Stalls(tmp_path, "read")
    rank = Rank(tmp_path, disk, deadline_s=0.3)
    rank.fill(0, 1.0)
    rank.move(Tier.DEVICE, Tier.DISK, [0], [0])

    rank.submit(Tier.DISK, Tier.DEVICE, [0], [5])
    assert disk.waits.wait(DEADLINE_S)
    beside = rank.move(Tier.DEVICE, Tier.HOST, [0], [0])
    stalled = rank.next_ended()
    rank.fill(5, 9.0)
    disk.go.set()
    after = rank.move(Tier.DISK, Tier.DEVICE, [0], [6])

    assert beside.good == 1
    assert (stalled.number, stalled.good, stalled.why) == (2, 0, "not done after 0.3 s")
    assert after.good == 1
    assert rank.holds(6, 1.0)
    assert rank.holds(5, 9.0)
    assert rank.mover.num_running == 0
    rank.mover.close()


def test_a_write_that_stalls_holds_up_no_page_of_the_device(tmp_path: Path) -> None:
    disk = Stalls(tmp_path, "write")
    rank = Rank(tmp_path, disk, deadline_s=1.0)
    rank.fill(0, 1.0)

    rank.submit(Tier.DEVICE, Tier.DISK, [0], [0])
    rank.mover.wait_for(np.array([0], np.int32))

    assert rank.ended.empty(), "nobody waits until the write is given up"
    assert rank.next_ended() == CopyEnded(1, 0, "not done after 1 s")
    disk.go.set()
    assert disk.done.wait(DEADLINE_S)
    assert rank.ended.empty()
    rank.mover.close()


def test_what_read_a_page_before_its_write_was_known_to_fail_does_not_get_what_was_there_before(
    tmp_path: Path,
) -> None:
    rank = Rank(tmp_path, FailsOnce(tmp_path))
    rank.fill(0, 1.0)
    assert rank.move(Tier.DEVICE, Tier.DISK, [0, 0, 0], [1, 2, 3]).good == 3
    rank.disk.fails = True  # type: ignore[attr-defined]

    failed = rank.move(Tier.DEVICE, Tier.DISK, [0, 0, 0], [1, 2, 3])

    assert (failed.good, failed.why) == (1, "no room")
    assert rank.move(Tier.DISK, Tier.DEVICE, [1], [4]).good == 1
    for page in (2, 3):
        assert rank.move(Tier.DISK, Tier.DEVICE, [page], [4]).why == f"page {page} was never written"
    rank.mover.close()


@pytest.mark.parametrize("target", [Tier.HOST, Tier.DISK])
def test_a_copy_given_up_before_it_began_leaves_nothing_in_its_pages(tmp_path: Path, target: Tier) -> None:
    rank = Rank(tmp_path, mover=LateMover, deadline_s=0.3)
    assert isinstance(rank.mover, LateMover)
    rank.fill(0, 1.0)
    rank.move(Tier.DEVICE, target, [0], [2])
    rank.mover.go.clear()

    given_up = rank.move(Tier.DEVICE, target, [0], [2])
    rank.submit(target, Tier.DEVICE, [2], [4])
    rank.mover.go.set()

    assert (given_up.good, given_up.why) == (0, "not done after 0.3 s")
    assert rank.next_ended().good == 0
    rank.mover.close()


def test_a_write_that_ends_after_its_deadline_stops_there(tmp_path: Path) -> None:
    disk = Stalls(tmp_path, "write")
    rank = Rank(tmp_path, disk, deadline_s=0.3)
    rank.submit(Tier.DEVICE, Tier.DISK, [0, 1], [0, 1])
    assert rank.next_ended().good == 0

    disk.go.set()
    rank.move(Tier.DEVICE, Tier.DISK, [2], [2])

    assert rank.move(Tier.DISK, Tier.DEVICE, [1], [4]).why == "page 1 was never written"
    rank.mover.close()


def test_behind_a_copy_that_is_stuck_while_it_touches_pages_the_others_end_at_their_deadline(tmp_path: Path) -> None:
    """The stuck one does not end before it is through, so nobody is given pages that it still writes to."""
    rank = Rank(tmp_path, mover=StuckMover, deadline_s=0.3)
    assert isinstance(rank.mover, StuckMover)
    rank.submit(Tier.DEVICE, Tier.HOST, [0], [0])
    assert rank.mover.stuck.wait(DEADLINE_S)

    behind = rank.move(Tier.DEVICE, Tier.HOST, [1], [1])

    assert behind == CopyEnded(2, 0, "not done after 0.3 s")
    assert rank.mover.num_running == 1
    rank.mover.go.set()
    assert rank.next_ended() == CopyEnded(1, 1)
    rank.mover.close()


def test_a_page_of_the_device_is_not_written_while_a_copy_that_is_stuck_may_read_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path, mover=StuckMover, deadline_s=0.1)
    assert isinstance(rank.mover, StuckMover)
    rank.fill(0, 1.0)
    rank.submit(Tier.DEVICE, Tier.HOST, [0], [0])

    def overwrite() -> None:
        rank.mover.wait_for(np.array([0], np.int32))
        rank.fill(0, 2.0)

    engine = threading.Thread(target=overwrite)
    engine.start()
    engine.join(0.4)
    assert engine.is_alive()
    rank.mover.go.set()
    assert rank.next_ended().good == 1
    engine.join(DEADLINE_S)

    rank.move(Tier.HOST, Tier.DEVICE, [0], [4])
    assert rank.holds(4, 1.0)
    rank.mover.close()


def test_who_cannot_be_told_of_one_copy_is_told_of_the_next_ones(tmp_path: Path) -> None:
    pool, host = DevicePool(LAYOUT, DEVICE_PAGES, CPU), HostPool(LAYOUT, HOST_PAGES, CPU)
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def on_ended(ended: CopyEnded) -> None:
        if ended.number % 2:
            raise OSError("nobody listens")
        told.put(ended.number)

    disk = Stalls(tmp_path, "write")
    mover = Mover(pool, host, disk, on_ended, deadline_s=0.2)
    page = np.array([0], np.int32)
    mover.submit([CopyWork(number, Tier.DEVICE, Tier.HOST, page, page) for number in (1, 2)])
    assert told.get(timeout=DEADLINE_S) == 2

    mover.submit([CopyWork(number, Tier.DEVICE, Tier.DISK, page, page) for number in (3, 4)])
    assert told.get(timeout=DEADLINE_S) == 4, "both were given up, each by the watch"
    disk.go.set()
    mover.close()


def test_closing_beside_a_stuck_call_of_the_disk_keeps_the_file_so_that_it_hits_no_other(tmp_path: Path) -> None:
    disk = Stalls(tmp_path, "write")
    rank = Rank(tmp_path, disk)
    rank.submit(Tier.DEVICE, Tier.DISK, [0], [0])
    assert disk.waits.wait(DEADLINE_S)
    number = disk._fd

    rank.mover.close()

    assert ".kinroute-pages-" in os.readlink(f"/proc/self/fd/{number}")
    disk.go.set()
    assert disk.done.wait(DEADLINE_S)
    disk.close()


def test_closing_does_not_wait_for_what_runs_for_longer_than_it_says(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    rank = Rank(tmp_path)
    assert len(set(threading.enumerate()) - before) == 3
    for _ in range(50):
        rank.submit(Tier.DEVICE, Tier.DISK, [0, 1, 2], [0, 1, 2])

    rank.mover.close()

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("seed", range(5))
def test_many_copies_leave_what_doing_them_one_by_one_would_have_left(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    rank = Rank(tmp_path)
    sizes = {Tier.DEVICE: DEVICE_PAGES, Tier.HOST: HOST_PAGES, Tier.DISK: DISK_PAGES}
    values: dict[Tier, list[float | None]] = {tier: [None] * size for tier, size in sizes.items()}
    for page in range(DEVICE_PAGES):
        rank.fill(page, 100.0 * page)
        values[Tier.DEVICE][page] = 100.0 * page
    asked = 0
    for _ in range(200):
        source, target = dice.choice(
            [
                (Tier.DEVICE, Tier.HOST),
                (Tier.DEVICE, Tier.DISK),
                (Tier.HOST, Tier.DISK),
                (Tier.HOST, Tier.DEVICE),
                (Tier.DISK, Tier.DEVICE),
            ]
        )
        filled = [page for page, value in enumerate(values[source]) if value is not None]
        if not filled:
            continue
        if target is Tier.DEVICE and source is Tier.DISK:
            # What reads it next is asked for only once a load has ended.
            while asked:
                assert rank.next_ended().why == ""
                asked -= 1
        count = dice.randint(1, min(len(filled), 4))
        sources, targets = dice.sample(filled, count), dice.sample(range(sizes[target]), count)
        rank.submit(source, target, sources, targets)
        asked += 1
        for here, there in zip(sources, targets, strict=True):
            values[target][there] = values[source][here]
        if target is Tier.DEVICE:
            while asked:
                assert rank.next_ended().why == ""
                asked -= 1

    while asked:
        assert rank.next_ended().why == ""
        asked -= 1
    assert all(rank.holds(page, value) for page, value in enumerate(values[Tier.DEVICE]) if value is not None)
    for tier in (Tier.HOST, Tier.DISK):
        for page, value in enumerate(values[tier]):
            if value is not None:
                assert rank.move(tier, Tier.DEVICE, [page], [0]).good == 1
                assert rank.holds(0, value)
    rank.mover.close()
