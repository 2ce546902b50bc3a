"""What a rank decided, as a rolling digest that the ranks compare and as the last few thousand decisions."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import NamedTuple

import msgspec

from worker.core.arrays import Int32s

REMEMBERED = 4096


class Decision(NamedTuple):
    """One change and what came of it, for the day two ranks differ. `facts`: block counts, run numbers, pages."""

    plan: int
    act: str
    subject: int | str
    facts: tuple[int, ...]


class Journal:
    """`note` each decision; `close` a plan to have the digest of everything up to there."""

    def __init__(self) -> None:
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self._hash = hashlib.blake2b(digest_size=16)
        self._encode = msgspec.msgpack.Encoder().encode
        self._plan = 0

    def begin(self, plan: int) -> None:
        self._plan = plan

    def note(self, act: str, subject: int | str, *facts: int, pages: Int32s | None = None) -> None:
        """`subject`: a request, or a conversation."""
        if pages is not None:
            facts = (*facts, *pages.tolist())
        decision = Decision(self._plan, act, subject, facts)
        self._hash.update(self._encode(decision))
        self.decisions.append(decision)

    def close(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()
