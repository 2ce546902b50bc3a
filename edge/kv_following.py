"""KV events as either protocol carries them, brought to the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edge.core.kv_index import Change, Cleared, KvBatch, Removed, Stored
from edge.core.resident import KEY_BYTES, Held
from enginelink.v1 import link_pb2
from openengine.v1 import kv_pb2

HASH_ENCODING = "sha256"
TIERS = {
    link_pb2.MEDIUM_DEVICE: Held.DEVICE,
    link_pb2.MEDIUM_HOST: Held.HOST,
    link_pb2.MEDIUM_DISK: Held.DISK,
}
STORAGE = {
    kv_pb2.STORAGE_MEDIUM_GPU: Held.DEVICE,
    kv_pb2.STORAGE_MEDIUM_CPU_PINNED: Held.HOST,
    kv_pb2.STORAGE_MEDIUM_DISK: Held.DISK,
}


class NotKv(Exception):
    """Raised when a worker's events cannot be read."""


def batch_from_link(events: link_pb2.KvEvents) -> KvBatch:
    """Raises NotKv."""
    return KvBatch(
        events.epoch,
        events.sequence,
        list(_link_changes(events.events)),
        events.snapshot,
        events.snapshot_begin,
        events.snapshot_end,
    )


def _link_changes(events: Iterable[link_pb2.KvEvent]) -> Iterator[Change]:
    """A changed priority changes nothing here."""
    for event in events:
        match event.WhichOneof("event"):
            case "stored":
                stored = event.stored
                yield Stored(stored.parent, _whole(stored.keys), TIERS.get(stored.medium, Held.UNSURE), stored.begins)
            case "removed":
                yield Removed(_whole(event.removed.keys), TIERS.get(event.removed.medium, Held.UNSURE))
            case "cleared":
                yield Cleared()


def _whole(keys: bytes) -> bytes:
    if not keys or len(keys) % KEY_BYTES:
        raise NotKv(f"keys of {len(keys)} bytes, where each has {KEY_BYTES}")
    return keys


class OpenEngineBatches:
    """Batches of one subscription with a snapshot: those with the first one's number are its parts, and the rest
    follow it. Each counts as the whole for as long as no other comes."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._snapshot: int | None = None

    def read(self, batch: kv_pb2.KvEventBatch) -> KvBatch:
        """Raises NotKv, for an engine whose blocks are named otherwise too."""
        begin = self._snapshot is None
        if self._snapshot is None:
            self._snapshot = batch.sequence_number
        is_part = batch.sequence_number == self._snapshot
        changes = list(_openengine_changes(batch.events))
        return KvBatch(self._epoch, batch.sequence_number, changes, is_part, begin, is_part)


def _openengine_changes(events: Iterable[kv_pb2.KvEvent]) -> Iterator[Change]:
    for event in events:
        match event.WhichOneof("event"):
            case "block_stored":
                stored = event.block_stored
                begins = not stored.HasField("parent_block_hash")
                parent = b"" if begins else _keys([stored.parent_block_hash])
                tier = STORAGE.get(stored.medium, Held.UNSURE)
                yield Stored(parent, _keys(stored.block_hashes), tier, begins)
            case "block_removed":
                removed = event.block_removed
                yield Removed(_keys(removed.block_hashes), STORAGE.get(removed.medium, Held.UNSURE))
            case "all_blocks_cleared":
                yield Cleared()


def _keys(hashes: Iterable[kv_pb2.KvBlockHash]) -> bytes:
    keys: list[bytes] = []
    for one in hashes:
        if one.encoding != HASH_ENCODING or len(one.value) != KEY_BYTES:
            raise NotKv(f"a block hash of {len(one.value)} bytes in {one.encoding!r}")
        keys.append(one.value)
    return _whole(b"".join(keys))
