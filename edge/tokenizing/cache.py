"""Token ids of segments seen before, bounded in bytes, least recently used first out."""

from __future__ import annotations

import sys
from collections import OrderedDict

ENTRY_BYTES = 300
"""What an entry costs beside its text and its ids: the key's tuple, the bytes header, the map's slot and links."""


class SegmentCache:
    """Maps (scope, segment) to the segment's packed ids. A scope never sees what another one stored, not even by time.

    The text itself is the key, so a hit is exact whatever the hash does. Not for use from several threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, scope: bytes, segment: str) -> bytes | None:
        """The segment's ids, and keep them longest; None if this scope does not have it (any more)."""
        key = (scope, segment)
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def put(self, scope: bytes, segment: str, ids: bytes) -> None:
        """Store a segment's ids; the oldest go until the bound holds. One larger than the bound is not stored."""
        cost = _cost(segment, ids)
        if cost > self.max_bytes or (scope, segment) in self._entries:
            return
        self._entries[scope, segment] = ids
        self.used_bytes += cost
        while self.used_bytes > self.max_bytes:
            (_, oldest), oldest_ids = self._entries.popitem(last=False)
            self.used_bytes -= _cost(oldest, oldest_ids)


def _cost(segment: str, ids: bytes) -> int:
    return sys.getsizeof(segment) + len(ids) + ENTRY_BYTES
