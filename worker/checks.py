"""Asks what every rank holds, and answers when all have said it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Held: TypeAlias = dict[str, Any]
Answer: TypeAlias = Callable[[list[Held]], None]


@dataclass(slots=True)
class _Open:
    answer: Answer
    held: dict[int, Held] = field(default_factory=dict)


class Checks:
    """Each rank answers every check, in order. Called on the engine thread and on the control thread."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: deque[_Open] = deque()
        self._lock = threading.Lock()

    def begin(self, answer: Answer) -> None:
        with self._lock:
            self._open.append(_Open(answer))

    def feed(self, rank: int, held: Held) -> None:
        """What `rank` holds, for the oldest check that it has not answered."""
        with self._lock:
            next(check for check in self._open if rank not in check.held).held[rank] = held
            done = []
            while self._open and len(self._open[0].held) == self._world_size:
                done.append(self._open.popleft())
        for check in done:
            check.answer([check.held[rank] for rank in range(self._world_size)])
