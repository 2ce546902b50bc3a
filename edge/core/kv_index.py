"""What each worker's cache holds, as its KV events tell it. Pure.

A worker whose events do not come, or may have been missed, counts as one of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edge.core.resident import BLOCK_BYTES, Held, Prints, ResidentBlocks
from edge.core.types import WorkerId

MAX_BYTES = 4 << 30
MIN_BLOCKS = 4096
REPAIR_EVERY_BATCHES = 256
"""A worker whose blocks have no known parents is asked for no more than one snapshot in so many batches."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow each other behind `parent`; `begins`: that is no block but the scope of a prompt."""

    parent: bytes
    keys: bytes
    tier: Held
    begins: bool


@dataclass(frozen=True, slots=True)
class Removed:
    keys: bytes
    tier: Held


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block of any tier is left."""


Change: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class KvBatch:
    """`epoch`: the start of the worker that numbered it. `snapshot`: a part of all there is after `sequence`."""

    epoch: str
    sequence: int
    changes: Sequence[Change]
    snapshot: bool = False
    begin: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """What to ask a worker for: what follows `sequence` of `epoch`, or a snapshot."""

    epoch: str
    sequence: int
    snapshot: bool


@dataclass(slots=True)
class FollowedWorker:
    """`complete`: a whole snapshot and all that followed is applied. `asked`: a snapshot is due; `loading`: it comes.

    The rest are totals: events applied and snapshots begun; `links`: how often it could be asked anew; `restarts`: how
    often it was found to have started again; what went wrong.
    """

    blocks: ResidentBlocks
    epoch: str = ""
    sequence: int = 0
    is_up: bool = False
    complete: bool = False
    asked: bool = False
    loading: bool = False
    batches_to_repair: int = 0
    events: int = 0
    snapshots: int = 0
    links: int = 0
    restarts: int = 0
    gaps: int = 0
    unknown_parents: int = 0


def least_bytes(num_workers: int) -> int:
    """What an index of so many workers needs, however little it keeps of each."""
    return num_workers * MIN_BLOCKS * BLOCK_BYTES


class KvIndex:
    """Of `num_workers` workers, within `max_bytes` for all of them together (see `ResidentBlocks` for what then)."""

    def __init__(self, num_workers: int, max_bytes: int = MAX_BYTES) -> None:
        assert max_bytes >= least_bytes(num_workers), f"{max_bytes} bytes for {num_workers} workers"
        self._max_blocks = max_bytes // BLOCK_BYTES // max(1, num_workers)
        self.workers: dict[WorkerId, FollowedWorker] = {}

    def connected(self, worker_id: WorkerId, epoch: str) -> Resume:
        """The worker that started as `epoch` can be asked now. Of another start, nothing is left."""
        worker = self.workers.setdefault(worker_id, FollowedWorker(ResidentBlocks(self._max_blocks)))
        if worker.epoch != epoch:
            self._empty(worker, epoch)
        worker.is_up, worker.loading = True, False
        worker.links += 1
        worker.asked = not worker.complete
        return Resume(epoch, worker.sequence, snapshot=not worker.complete)

    def lost(self, worker_id: WorkerId) -> None:
        """Until it is connected again, nothing is known of it."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.is_up = False

    def feed(self, worker_id: WorkerId, batch: KvBatch) -> bool:
        """Apply it. False: something is missing, ask for a snapshot."""
        worker = self.workers[worker_id]
        if batch.epoch != worker.epoch:
            self._empty(worker, batch.epoch)
        if batch.snapshot:
            return self._load(worker, batch)
        if not worker.complete or batch.sequence != worker.sequence + 1:
            return self._gap(worker)
        worker.sequence = batch.sequence
        worker.batches_to_repair -= 1
        if self._apply(worker, batch.changes) or worker.batches_to_repair > 0:
            return True
        worker.batches_to_repair = REPAIR_EVERY_BATCHES
        worker.asked = True
        return False

    def known_blocks(self, worker_id: WorkerId, prints: Prints) -> int | None:
        """How many of a prompt's first blocks the worker holds; None where that is not known."""
        worker = self.workers.get(worker_id)
        return worker.blocks.longest(prints) if worker is not None and worker.is_up and worker.complete else None

    def is_known(self, worker_id: WorkerId) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and worker.is_up and worker.complete

    def _gap(self, worker: FollowedWorker) -> bool:
        """What is known holds no more. Asked once: what still comes before the snapshot is of no use."""
        is_due = worker.asked and not worker.loading
        worker.gaps += worker.complete or not is_due
        worker.complete = worker.loading = False
        worker.asked = True
        return is_due

    def _empty(self, worker: FollowedWorker, epoch: str) -> None:
        worker.restarts += bool(worker.epoch)
        worker.epoch, worker.sequence = epoch, 0
        worker.complete = worker.loading = worker.asked = False
        worker.batches_to_repair = 0
        worker.blocks.clear()

    def _load(self, worker: FollowedWorker, batch: KvBatch) -> bool:
        if batch.begin:
            worker.blocks.clear()
            worker.sequence, worker.loading = batch.sequence, True
            worker.snapshots += 1
            worker.asked = worker.complete = False
        elif batch.sequence != worker.sequence or not (worker.loading or worker.complete):
            return self._gap(worker)
        self._apply(worker, batch.changes)
        if batch.end:
            worker.loading, worker.complete = False, True
        return True

    def _apply(self, worker: FollowedWorker, changes: Sequence[Change]) -> bool:
        """False: some parent is not known."""
        unknown = 0
        for change in changes:
            match change:
                case Stored():
                    unknown += not worker.blocks.stored(change.parent, change.keys, change.tier, begins=change.begins)
                case Removed():
                    worker.blocks.removed(change.keys, change.tier)
                case Cleared():
                    worker.blocks.clear()
        worker.events += len(changes)
        worker.unknown_parents += unknown
        return not unknown
