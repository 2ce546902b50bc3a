"""Pages that wait for an orchestrator are let go in time, and no tenant keeps too many."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.core.types import ConversationKey, FinishReason, Lineage, TurnId, WorkerId
from edge.legs import LegListener, LegOrder
from edge.pins import MAX_PINS, Pin, Pins


@dataclass
class Worker:
    """What a connection was told."""

    worker_id: WorkerId = field(default_factory=lambda: WorkerId("w"))
    cancelled: list[int] = field(default_factory=list)
    told: list[tuple[str, FinishReason | None, bool]] = field(default_factory=list)

    async def run(self) -> None: ...

    def submit(self, order: LegOrder, listener: LegListener) -> int:
        raise AssertionError("nothing is sent")

    def cancel(self, handle: int) -> None:
        self.cancelled.append(handle)

    def generating(self, conversation: ConversationKey) -> None: ...

    def ended(self, conversation: ConversationKey, reason: FinishReason | None, *, final: bool) -> None:
        self.told.append((conversation, reason, final))

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str) -> None: ...


def pin(worker: Worker, number: int, tenant: str = "acme", until_s: float = 100.0, *, final: bool = False) -> Pin:
    key = ("instance", f"session-{number}")
    return Pin(key, tenant, worker, number, ConversationKey(f"c-{number}"), final, until_s)


def test_a_pin_ends_when_its_time_is_over() -> None:
    worker, pins = Worker(), Pins()
    pins.add(pin(worker, 1, until_s=10.0))
    pins.add(pin(worker, 2, until_s=20.0))

    pins.expire(10.0)

    assert worker.cancelled == [1]
    assert worker.told == [("c-1", None, False)]
    assert len(pins) == 1


def test_one_that_is_being_fetched_is_nobodys_to_end() -> None:
    worker, pins = Worker(), Pins()
    pins.add(pin(worker, 1))

    taken = pins.take(("instance", "session-1"))
    pins.expire(1000.0)

    assert taken is not None
    assert not pins.abort(taken.key)
    assert pins.take(taken.key) is None
    assert not worker.cancelled


def test_all_of_a_tenant_end_together_and_no_others() -> None:
    worker, pins = Worker(), Pins()
    for number, tenant in enumerate(("acme", "other", "acme")):
        pins.add(pin(worker, number, tenant))

    assert pins.abort_all("acme") == 2
    assert worker.cancelled == [0, 2]
    assert pins.abort_all(None) == 1


def test_a_tenant_with_too_many_loses_its_oldest_and_nobody_elses() -> None:
    worker, pins = Worker(), Pins()
    pins.add(pin(worker, -1, "other"))
    for number in range(MAX_PINS + 2):
        pins.add(pin(worker, number))

    assert worker.cancelled == [0, 1]
    assert len(pins) == MAX_PINS + 1


def test_a_final_mark_is_told_where_the_answer_ended_well() -> None:
    worker = Worker()
    last = pin(worker, 1, final=True)

    last.ended(FinishReason.STOP)
    last.ended(None)

    assert worker.told == [("c-1", FinishReason.STOP, True), ("c-1", None, False)]
