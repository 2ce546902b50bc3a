"""Keeps a step's outputs until every rank has decided that step alike."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.commands import KvSnapshot, Told
from worker.core.events import CacheEvent
from worker.core.outputs import LoadSnapshot


@dataclass(frozen=True, slots=True)
class StepTold:
    """What one step has to tell, and how loaded the worker was after it.

    `kv_snapshots`: taken before the step, so that its `kv_events` follow them.
    """

    number: int
    told: Sequence[Told]
    load: LoadSnapshot
    kv_snapshots: Sequence[KvSnapshot] = ()
    kv_events: Sequence[CacheEvent] = ()


class Gate:
    """The engine thread holds, the control thread opens; whoever comes second delivers, in the order of holding."""

    def __init__(self, deliver: Callable[[StepTold], None]) -> None:
        self._deliver = deliver
        self._held: deque[StepTold] = deque()
        self._agreed = 0
        self._lock = threading.Lock()

    def hold(self, step: StepTold) -> None:
        with self._lock:
            if step.number <= self._agreed and not self._held:
                self._deliver(step)
            else:
                self._held.append(step)

    def open(self, number: int) -> None:
        """All ranks agree on the plans up to `number`."""
        with self._lock:
            self._agreed = number
            while self._held and self._held[0].number <= number:
                self._deliver(self._held.popleft())
