"""What the event log says, in the messages of both protocols."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from enginelink.v1 import link_pb2
from openengine.v1 import kv_pb2
from worker.core.events import KEY_BYTES, CacheEvent, Cleared, Removed, Stored, Updated
from worker.core.tiers import Tier
from worker.kv_batches import Batch, SnapshotPart

HASH_ENCODING = "sha256"
MEDIUMS = {Tier.DEVICE: link_pb2.MEDIUM_DEVICE, Tier.HOST: link_pb2.MEDIUM_HOST, Tier.DISK: link_pb2.MEDIUM_DISK}
STORAGE = {
    Tier.DEVICE: kv_pb2.STORAGE_MEDIUM_GPU,
    Tier.HOST: kv_pb2.STORAGE_MEDIUM_CPU_PINNED,
    Tier.DISK: kv_pb2.STORAGE_MEDIUM_DISK,
}
MAX_KEPT = 256


class LinkEncoder:
    """EngineLink's messages. The last are kept: every edge is sent the same ones."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._kept: OrderedDict[int, link_pb2.WorkerMessage] = OrderedDict()

    def message(self, read: Batch | SnapshotPart) -> link_pb2.WorkerMessage:
        if isinstance(read, SnapshotPart):
            events = self._events(read)
            events.snapshot, events.snapshot_begin, events.snapshot_end = True, read.begin, read.end
            return link_pb2.WorkerMessage(kv_events=events)
        message = self._kept.get(read.sequence)
        if message is None:
            message = self._kept[read.sequence] = link_pb2.WorkerMessage(kv_events=self._events(read))
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return message

    def _events(self, read: Batch | SnapshotPart) -> link_pb2.KvEvents:
        return link_pb2.KvEvents(
            epoch=self._epoch, sequence=read.sequence, events=[_link_event(event) for event in read.events]
        )


def _link_event(event: CacheEvent) -> link_pb2.KvEvent:
    match event:
        case Stored():
            stored = link_pb2.KvStored(
                parent=event.parent, keys=event.keys, medium=MEDIUMS[event.tier], begins=event.begins
            )
            return link_pb2.KvEvent(stored=stored)
        case Removed():
            return link_pb2.KvEvent(removed=link_pb2.KvRemoved(keys=event.keys, medium=MEDIUMS[event.tier]))
        case Updated():
            updated = link_pb2.KvUpdated(
                first=event.first,
                last=event.last,
                count=event.count,
                old_priority=event.old_priority,
                new_priority=event.new_priority,
            )
            return link_pb2.KvEvent(updated=updated)
        case Cleared():
            return link_pb2.KvEvent(cleared=link_pb2.KvCleared())


def openengine_batch(read: Batch | SnapshotPart, block_size: int) -> kv_pb2.KvEventBatch:
    """A changed priority has no message there: a batch of nothing else is empty, so that no number is left out."""
    events = [told for event in read.events if (told := _openengine_event(event, block_size)) is not None]
    return kv_pb2.KvEventBatch(
        sequence_number=read.sequence, timestamp_unix_nanos=read.unix_ns, data_parallel_rank=0, events=events
    )


def _openengine_event(event: CacheEvent, block_size: int) -> kv_pb2.KvEvent | None:
    match event:
        case Stored():
            stored = kv_pb2.BlockStored(
                block_hashes=_hashes(event.keys),
                parent_block_hash=None if event.begins else _hash(event.parent),
                token_ids=event.token_ids.astype(np.uint32, copy=False),
                block_size=block_size,
                medium=STORAGE[event.tier],
            )
            return kv_pb2.KvEvent(block_stored=stored)
        case Removed():
            removed = kv_pb2.BlockRemoved(block_hashes=_hashes(event.keys), medium=STORAGE[event.tier])
            return kv_pb2.KvEvent(block_removed=removed)
        case Cleared():
            return kv_pb2.KvEvent(all_blocks_cleared=kv_pb2.AllBlocksCleared())
    return None


def _hashes(keys: bytes) -> list[kv_pb2.KvBlockHash]:
    return [_hash(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]


def _hash(key: bytes) -> kv_pb2.KvBlockHash:
    return kv_pb2.KvBlockHash(value=key, encoding=HASH_ENCODING)
