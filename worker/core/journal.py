"""What a rank decided, as a rolling digest that the ranks compare and as the last few thousand decisions."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from worker.core.arrays import Int32s

REMEMBERED = 4096
DIGEST_BYTES = 16


class Decision(NamedTuple):
    """One change and what came of it, for the day two ranks differ. `facts`: block counts, run numbers, priorities;
    `pages`: little-endian int32."""

    plan: int
    act: str
    subject: int | str
    facts: tuple[int, ...]
    pages: bytes = b""

    def portable(self) -> tuple[object, ...]:
        """With its pages as numbers."""
        return (self.plan, self.act, self.subject, self.facts, memoryview(self.pages).cast("i").tolist())


class Journal:
    """`note` each decision; `close` a plan to have the digest of everything up to there.

    A plan's digest covers the digest before it, so a journal can go on from one.
    """

    def __init__(self) -> None:
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self.digest = b""
        self._encode = msgspec.msgpack.Encoder().encode
        self._plan = 0
        self._fresh: list[Decision] = []

    def begin(self, plan: int) -> None:
        self._plan = plan
        self._fresh = []

    def note(self, act: str, subject: int | str, *facts: int, pages: Int32s | Iterable[Int32s] | None = None) -> None:
        """`subject`: a request, a conversation, a run or a copy."""
        packed = b""
        if pages is not None:
            packed = pages.tobytes() if hasattr(pages, "tobytes") else b"".join(part.tobytes() for part in pages)
        decision = Decision(self._plan, act, subject, facts, packed)
        self._fresh.append(decision)
        self.decisions.append(decision)

    def close(self) -> bytes:
        """16 bytes."""
        told = self.digest + self._encode(self._fresh)
        self.digest = hashlib.blake2b(told, digest_size=DIGEST_BYTES).digest()
        return self.digest
