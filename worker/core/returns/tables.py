"""What a conversation's blocks are worth by class and age: whole numbers, so that every rank has the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from worker.core.returns.ages import NUM_BUCKETS
from worker.core.returns.classes import EVERYBODY

ABANDONED = 0
"""No conversation's latest path leads there."""
LEAST, MOST = 1, 16_000
"""Bounds of what an idle conversation's blocks are worth."""
IN_FLIGHT = 2**15
"""A request of the conversation is being answered."""

PRIOR = tuple(range(NUM_BUCKETS, 0, -1))
"""Before anything is known: the younger the better, so that order is that of `lru`."""


def packed(rows: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], bytes]:
    """The classes, and their rows as little-endian uint16."""
    return tuple(rows), np.array(list(rows.values()), "<u2").tobytes()


def unpacked(groups: Sequence[int], values: bytes) -> Tables:
    rows = np.frombuffer(values, "<u2").reshape(len(groups), NUM_BUCKETS).tolist()
    return Tables(dict(zip(groups, rows, strict=True)))


class Tables:
    """Rows of NUM_BUCKETS values by class; a class without one has the row of everybody."""

    def __init__(self, rows: Mapping[int, Sequence[int]] | None = None) -> None:
        self._rows = {EVERYBODY: PRIOR, **(rows or {})}

    @property
    def rows(self) -> Mapping[int, Sequence[int]]:
        return self._rows

    @property
    def is_learned(self) -> bool:
        """Not what holds before anything is known."""
        return self._rows[EVERYBODY] is not PRIOR

    def value(self, group: int, bucket: int) -> int:
        return (self._rows.get(group) or self._rows[EVERYBODY])[bucket]
