"""What changed in the cache, for those who follow it from outside: the last batches, and snapshots for who is behind.

Rank 0's event loop feeds the log with what the gate has let through, so nothing that ranks disagree on is told.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from worker.commands import KvSnapshot
from worker.core.events import CacheEvent
from worker.kv_batches import Batch, Snapshot, SnapshotPart, bytes_of, portions
from worker.kv_event_metrics import KvEventMetrics

MAX_BUFFER_BYTES = 64 << 20
"""Of keys and tokens in the log, however few batches that is."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The next batch is not to be had any more, or was never. `oldest`: the first that is."""

    wanted: int
    oldest: int


class EventLog:
    """The last `max_batches` batches of the worker that `epoch` names; 0 keeps none, and nobody can follow.

    `ask`: have a snapshot with this ticket taken; `deliver` brings it, in order with the events.
    """

    def __init__(
        self,
        epoch: str,
        max_batches: int,
        ask: Callable[[int], None],
        metrics: KvEventMetrics,
        max_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        self.epoch = epoch
        self.metrics = metrics
        self.max_batches = max_batches
        self.last = 0
        self._max_bytes = max_bytes
        self._ask = ask
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._tickets = count(1)
        self._asked: int | None = None
        self._wanting: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._latest: weakref.ref[Snapshot] | None = None

    @property
    def is_on(self) -> bool:
        return self.max_batches > 0

    @property
    def oldest(self) -> int:
        """The number of the oldest batch that is still here; where there is none, of the next."""
        return self.last - len(self._batches) + 1

    def deliver(self, snapshots: Sequence[KvSnapshot], events: Sequence[CacheEvent]) -> None:
        """One step: what was taken before it, then what it changed."""
        if not self.is_on:
            return
        for taken in snapshots:
            self._take(taken)
        for portion in portions(events):
            self.last += 1
            self._batches.append(Batch(self.last, portion, time.time_ns()))
            self._bytes += bytes_of(portion)
            while len(self._batches) > self.max_batches or self._bytes > self._max_bytes:
                self._bytes -= bytes_of(self._batches.popleft().events)
        self.metrics.events.inc(len(events))
        self.metrics.batches.set(len(self._batches))
        self.metrics.bytes.set(self._bytes)
        if events or snapshots:
            for follower in list(self._followers):
                follower.wake()

    def follow(self, wake: Callable[[], None], *, start: int | None) -> Follower:
        """From batch `start` on; None: a snapshot first. `wake` is called when there may be more to read."""
        follower = Follower(self, wake, start)
        self._followers.add(follower)
        return follower

    def batch(self, sequence: int) -> Batch | None:
        index = sequence - self.oldest
        return self._batches[index] if 0 <= index < len(self._batches) else None

    def want(self, follower: Follower) -> None:
        """`follower.take` gets a snapshot: one that another reads just now, else the next."""
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.sequence + 1 >= self.oldest:
            follower.take(latest)
            return
        self._wanting.add(follower)
        if self._asked is None:
            self._asked = next(self._tickets)
            self._ask(self._asked)

    def _take(self, taken: KvSnapshot) -> None:
        if taken.ticket != self._asked:
            return
        self._asked = None
        self.metrics.snapshots.inc()
        snapshot = Snapshot(self.last, time.time_ns(), taken.stored)
        self._latest = weakref.ref(snapshot)
        wanting, self._wanting = list(self._wanting), weakref.WeakSet()
        for follower in wanting:
            follower.take(snapshot)


class Follower:
    """One reader, at its own pace: it costs nothing but its place. Forgotten when nobody holds it any more."""

    def __init__(self, log: EventLog, wake: Callable[[], None], start: int | None) -> None:
        self._log = log
        self.wake = wake
        self._next = start or 0
        self._parts: Iterator[SnapshotPart] | None = None
        self._waits = False
        if start is None:
            self.restart()

    def restart(self) -> None:
        """Read a snapshot next, and what follows it."""
        self._parts = None
        if not self._waits:
            self._waits = True
            self._log.want(self)

    def take(self, snapshot: Snapshot) -> None:
        self._waits = False
        self._parts = snapshot.parts()
        self._next = snapshot.sequence + 1

    def read(self) -> Batch | SnapshotPart | Behind | None:
        """The next thing. None: nothing yet, `wake` will be called. Behind: it stays so until `restart`."""
        if self._waits:
            return None
        if self._parts is not None:
            part = next(self._parts, None)
            if part is not None:
                return part
            self._parts = None
        batch = self._log.batch(self._next)
        if batch is not None:
            self._next += 1
            return batch
        if self._next == self._log.last + 1:
            return None
        return Behind(self._next, self._log.oldest)
