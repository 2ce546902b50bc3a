"""The events of the cache in batches that fit onto the wire, and all that it holds in such parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from worker.core.events import KEY_BYTES, CacheEvent, Cleared, Removed, Stored, Updated

EVENT_BYTES = 200
MAX_BATCH_COST = 1 << 18
"""In tokens, a key or an event being worth 16: so a batch takes less than a megabyte on either wire, where clients
accept four, whatever a step changed."""
KEY_COST = 16


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step changed; if that is very much, a part of it. Numbers rise by one from 1. `unix_ns`: when it was
    agreed."""

    sequence: int
    events: Sequence[CacheEvent]
    unix_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPart:
    """A part of what the cache held after batch `sequence`; parents come before children."""

    sequence: int
    events: Sequence[CacheEvent]
    unix_ns: int
    begin: bool
    end: bool


@dataclass(eq=False)
class Snapshot:
    """Shared by those who asked for it at once, and lives as long as one of them reads it."""

    sequence: int
    unix_ns: int
    stored: Sequence[Stored]

    def parts(self) -> Iterator[SnapshotPart]:
        """At least one."""
        begin, last = True, None
        for events in portions(self.stored):
            if last is not None:
                yield SnapshotPart(self.sequence, last, self.unix_ns, begin, end=False)
                begin = False
            last = events
        yield SnapshotPart(self.sequence, last or (), self.unix_ns, begin, end=True)


def portions(events: Sequence[CacheEvent]) -> Iterator[list[CacheEvent]]:
    """The same in order, cut where it would be too much for one batch."""
    portion: list[CacheEvent] = []
    room = MAX_BATCH_COST
    for event in events:
        for piece in _pieces(event):
            cost = cost_of(piece)
            if portion and cost > room:
                yield portion
                portion, room = [], MAX_BATCH_COST
            portion.append(piece)
            room -= cost
    if portion:
        yield portion


def _pieces(event: CacheEvent) -> Iterator[CacheEvent]:
    """An event about blocks that follow each other, cut where it would be too much for one batch."""
    if isinstance(event, Updated | Cleared) or cost_of(event) <= MAX_BATCH_COST:
        yield event
        return
    keys = event.keys
    blocks = len(keys) // KEY_BYTES
    step = max(1, MAX_BATCH_COST * blocks // cost_of(event))
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        own = keys[KEY_BYTES * start : KEY_BYTES * stop]
        if isinstance(event, Removed):
            yield Removed(own, event.tier)
            continue
        size = len(event.token_ids) // blocks
        parent = keys[KEY_BYTES * (start - 1) : KEY_BYTES * start] if start else event.parent
        yield Stored(parent, own, event.tier, event.token_ids[size * start : size * stop], event.begins and not start)


def cost_of(event: CacheEvent) -> int:
    match event:
        case Stored():
            return KEY_COST * (len(event.keys) // KEY_BYTES) + len(event.token_ids)
        case Removed():
            return KEY_COST * (len(event.keys) // KEY_BYTES)
    return KEY_COST


def bytes_of(events: Sequence[CacheEvent]) -> int:
    total = EVENT_BYTES * len(events)
    for event in events:
        match event:
            case Stored():
                total += len(event.keys) + event.token_ids.nbytes
            case Removed():
                total += len(event.keys)
    return total
