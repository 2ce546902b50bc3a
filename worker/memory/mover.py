"""Copies pages between the tiers of one rank, beside its engine thread.

Two threads, each in the order in which it is given work. The first copies memory and never waits for the disk; the
second reads and writes the disk, and touches no page in memory itself: what goes to the disk was put aside for it by
the first, and what it read is put in place by the first. So copies that share a page happen in the order of their
numbers, a stalled disk holds up nothing else, and what a stalled call does late, it does to memory that nobody needs.

A page of host or disk that a copy should have filled and did not holds nothing, whatever was there before: a copy that
was asked for before the failure was known may still read it, and must not take an older block's bytes for good.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog
import torch

from worker.core.arrays import Int32s
from worker.core.tiers import CopyEnded, CopyWork, Tier
from worker.memory.device import DevicePool
from worker.memory.disk import Bytes, DiskError, DiskFile, aligned
from worker.memory.host import HostPool

WATCH_EVERY_S = 0.05
CLOSE_DEADLINE_S = 2.0

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Copy:
    """`left`: its source pages of the device are read. `lock`: held while pages of a tier are touched, and to end it.

    `good`, `why`: what its threads know so far.
    """

    work: CopyWork
    deadline_s: float
    computed: torch.cuda.Event | None
    left: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False
    aside: Bytes | None = None
    good: int = 0
    why: str = ""


_Steps = queue.SimpleQueue["tuple[Callable[[_Copy], None], _Copy] | None"]
"""What a thread has to do, and for which copy."""


class Mover:
    """`submit` and `wait_for` are the engine thread's; `on_ended` is called once for each copy, on any thread."""

    def __init__(
        self,
        device: DevicePool,
        host: HostPool | None,
        disk: DiskFile | None,
        on_ended: Callable[[CopyEnded], None],
        *,
        deadline_s: float,
    ) -> None:
        """`deadline_s`: a copy that has not ended so long after it was asked for has failed."""
        pages = device.tensor.flatten(1).view(torch.uint8)
        self._memory: dict[Tier, torch.Tensor] = {Tier.DEVICE: pages}
        if host is not None:
            self._memory[Tier.HOST] = host.tensor
        self._arrived = np.zeros(host.num_pages if host is not None else 0, np.bool_)
        self._disk = disk
        self._on_ended = on_ended
        self._deadline_s = deadline_s
        self._stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None  # type: ignore[no-untyped-call]
        self._running: dict[int, _Copy] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._to_memory: _Steps = queue.SimpleQueue()
        self._to_disk: _Steps = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(self._to_memory,), name="copies", daemon=True),
            threading.Thread(target=self._watch, name="copies-watch", daemon=True),
        ]
        if disk is not None:
            self._threads.append(threading.Thread(target=self._work, args=(self._to_disk,), name="disk", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, copies: Sequence[CopyWork]) -> None:
        """Begin these, in their order; returns at once."""
        for work in copies:
            copy = _Copy(work, time.monotonic() + self._deadline_s, self._computed())
            with self._lock:
                self._running[work.number] = copy
            self._to_memory.put((self._begin, copy))

    def wait_for(self, pages: Int32s) -> None:
        """Returns once no running copy has still to read any of these pages of the device.

        Only a device that copies no more makes it last; the step is overdue then, and its group ends for that.
        """
        with self._lock:
            leaving = [copy for copy in self._running.values() if copy.work.source is Tier.DEVICE]
        for copy in leaving:
            if not copy.left.is_set() and np.isin(copy.work.sources, pages).any():
                copy.left.wait()

    def close(self) -> None:
        """What runs may never be told to have ended, and what has not begun never begins."""
        self._closing.set()
        self._to_memory.put(None)
        self._to_disk.put(None)
        for thread in self._threads:
            thread.join(CLOSE_DEADLINE_S)
        # A call that is stuck in the disk keeps the descriptor, whose number would soon be another file's.
        if self._disk is not None and not any(thread.is_alive() for thread in self._threads):
            self._disk.close()

    def _computed(self) -> torch.cuda.Event | None:
        """When the device has done what it has been told to compute so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    # On the memory thread.

    def _begin(self, copy: _Copy) -> None:
        work = copy.work
        if work.source is Tier.DISK:
            self._to_disk.put((self._read, copy))
            return
        if work.target is Tier.HOST:
            self._arrived[work.targets] = False
        try:
            with copy.lock:
                if not copy.ended:
                    self._leave(copy)
        finally:
            copy.left.set()
            if work.target is Tier.DISK:
                # Where nothing was put aside too: its pages hold nothing from now on.
                self._to_disk.put((self._write, copy))
        if work.target is not Tier.DISK:
            self._end(copy, copy.good, copy.why)

    def _leave(self, copy: _Copy) -> None:
        """Its sources are read: they are in its targets, or aside."""
        work = copy.work
        copy.good = self._num_arrived(work)
        if copy.good < len(work.sources):
            copy.why = f"page {work.sources[copy.good]} of the host never arrived there"
        if work.target is Tier.DISK:
            copy.aside = self._put_aside(copy)
            return
        self._transfer(copy, self._memory[work.source], work.sources, self._memory[work.target], work.targets)
        if work.target is Tier.HOST:
            self._arrived[work.targets[: copy.good]] = True

    def _num_arrived(self, work: CopyWork) -> int:
        """How many of the first sources hold what they should."""
        if work.source is Tier.DEVICE:
            return len(work.sources)
        arrived = self._arrived[work.sources]
        return len(arrived) if arrived.all() else int(arrived.argmin())

    def _put_aside(self, copy: _Copy) -> Bytes:
        assert self._disk is not None, "a copy to a disk that there is not"
        aside = aligned(copy.good * self._disk.stride).reshape(copy.good, self._disk.stride)
        pages = torch.from_numpy(aside)[:, : self._disk.page_bytes]
        targets = np.arange(copy.good, dtype=np.int32)
        self._transfer(copy, self._memory[copy.work.source], copy.work.sources, pages, targets)
        return aside

    def _put_in_place(self, copy: _Copy) -> None:
        """What the disk had is on its pages of the device."""
        with copy.lock:
            if not copy.ended and copy.aside is not None:
                pages = torch.from_numpy(copy.aside)[:, : self._memory[Tier.DEVICE].shape[1]]
                sources = np.arange(copy.good, dtype=np.int32)
                self._transfer(copy, pages, sources, self._memory[Tier.DEVICE], copy.work.targets)
        self._end(copy, copy.good, copy.why)

    def _transfer(
        self, copy: _Copy, source: torch.Tensor, sources: Int32s, target: torch.Tensor, targets: Int32s
    ) -> None:
        """The first `copy.good` pages, neighbours at once."""
        if self._stream is None:
            # numpy copies on this thread alone, without Python's lock.
            here, there = source.numpy(), target.numpy()
            for at, to, count in _neighbours(sources[: copy.good], targets[: copy.good]):
                np.copyto(there[to : to + count], here[at : at + count])
            return
        with torch.cuda.stream(self._stream):
            if copy.computed is not None:
                self._stream.wait_event(copy.computed)
            for at, to, count in _neighbours(sources[: copy.good], targets[: copy.good]):
                target[to : to + count].copy_(source[at : at + count], non_blocking=True)
        self._stream.synchronize()

    # On the disk thread.

    def _write(self, copy: _Copy) -> None:
        assert self._disk is not None
        self._disk.forget(copy.work.targets)
        aside = copy.aside
        if aside is None:
            return
        for index, page in enumerate(copy.work.targets[: copy.good].tolist()):
            if copy.ended:
                return
            try:
                self._disk.write(page, aside[index])
            except DiskError as error:
                copy.good, copy.why = index, str(error)
                break
        self._end(copy, copy.good, copy.why)

    def _read(self, copy: _Copy) -> None:
        assert self._disk is not None
        work = copy.work
        aside = aligned(len(work.sources) * self._disk.stride).reshape(-1, self._disk.stride)
        good = 0
        for index, page in enumerate(work.sources.tolist()):
            if copy.ended:
                return
            try:
                self._disk.read(page, aside[index])
            except DiskError as error:
                copy.why = str(error)
                break
            good += 1
        copy.good, copy.aside = good, aside
        self._to_memory.put((self._put_in_place, copy))

    # On any thread.

    def _work(self, steps: _Steps) -> None:
        while (step := steps.get()) is not None and not self._closing.is_set():
            self._carry_out(*step)

    def _carry_out(self, do: Callable[[_Copy], None], copy: _Copy) -> None:
        try:
            do(copy)
        except Exception as error:
            log.error("a copy between tiers failed", number=copy.work.number, exc_info=error)
            self._end(copy, 0, repr(error))

    def _end(self, copy: _Copy, good: int, why: str) -> None:
        """The first `good` pages are in place. The first to say how it ended is right."""
        with copy.lock:
            if copy.ended:
                return
            copy.ended = True
            copy.aside = None
        copy.left.set()
        with self._lock:
            del self._running[copy.work.number]
        self._on_ended(CopyEnded(copy.work.number, good, why))

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_EVERY_S):
            now_s = time.monotonic()
            with self._lock:
                late = [copy for copy in self._running.values() if copy.deadline_s < now_s]
            for copy in late:
                # One that touches pages right now cannot end before it is through; the others do not wait for that.
                if not copy.lock.locked():
                    self._carry_out(self._give_up, copy)

    def _give_up(self, copy: _Copy) -> None:
        self._end(copy, 0, f"not done after {self._deadline_s:g} s")


def _neighbours(sources: Int32s, targets: Int32s) -> Iterable[tuple[int, int, int]]:
    """(first source, first target, count) of each stretch in which both follow each other."""
    if not len(sources):
        return
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    for start, stop in itertools.pairwise([0, *breaks.tolist(), len(sources)]):
        yield int(sources[start]), int(targets[start]), stop - start
