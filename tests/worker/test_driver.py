from __future__ import annotations

import queue
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from worker.checks import Checks
from worker.commands import Cancel, Command, Pulled, Returned, Stop, Submit, TakeKvSnapshot
from worker.core import plan as plans
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.events import CacheEvent, Removed, Stored
from worker.core.outputs import Finished, KvArrived
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.step_work import StepWork
from worker.core.types import FinishReason, Phase, Request, RequestKey, Sampling, Stopping
from worker.driver import Driver
from worker.engine import Engine
from worker.gate import Gate, StepTold
from worker.model.sampling import Sampler
from worker.telemetry import Metrics

KEY = RequestKey(1)
SOURCE = b"where the pages are"


@dataclass
class ScriptedEngine:
    """A rank without pages: once a pull begins, it has arrived, and its caller is gone, before the next step."""

    replica: Replica
    inbox: queue.SimpleQueue[Command]
    released: list[bytes] = field(default_factory=list)

    def begin(self, work: StepWork) -> list[RequestKey]:
        for pull in work.pulls:
            self.inbox.put(Pulled(pull.request, None))
            self.inbox.put(Cancel(pull.request))
        return []

    def forward(self, work: StepWork) -> None:
        return None

    def release(self, source: bytes) -> None:
        self.released.append(source)
        self.inbox.put(Stop())


class NoFollowers:
    def send_plan(self, number: int, encoded: bytes) -> None: ...
    def applied(self, number: int, digest: bytes) -> None: ...
    def ask_check(self) -> None: ...


def test_pages_that_arrive_as_their_caller_leaves_are_still_released_at_their_source() -> None:
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    replica = Replica(CacheConfig(num_pages=8, tokens_per_block=2))
    engine = ScriptedEngine(replica, inbox)
    told: list[StepTold] = []
    gate = Gate(told.append)
    gate.open(1_000)
    driver = Driver(
        inbox,
        cast(Engine, engine),
        Scheduler(SchedulerConfig(), replica, lambda request: SOURCE),
        Sampler(16, torch.device("cpu")),
        NoFollowers(),
        gate,
        Checks(1),
        Metrics(),
    )
    request: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "stopping": Stopping(max_tokens=4)}
    prompt = np.array([1, 2, 3], np.int32)
    inbox.put(Submit(Request(KEY, Phase.GENERATION, prompt, **request, first_token=4, kv_session=SOURCE)))

    driver.run()

    assert engine.released == [SOURCE]
    outputs = [output for step in told for output in step.told]
    assert outputs[-2:] == [KvArrived(KEY), Finished(KEY, FinishReason.CANCELLED)]


@dataclass
class WatchedEngine(ScriptedEngine):
    """Computes nothing, and asks in every step for a snapshot, of which the last ends the driver."""

    asked: int = 0
    wanted: int = 12

    def forward(self, work: StepWork) -> torch.Tensor | None:  # type: ignore[override]
        self.asked += 1
        self.inbox.put(TakeKvSnapshot(self.asked))
        if self.asked == self.wanted:
            self.inbox.put(Stop())
        return None if work.batch is None else torch.zeros(len(work.batch.sample_requests), 16)


def keys_in(events: Iterable[CacheEvent]) -> set[bytes]:
    """Of the blocks that are there after `events`."""
    held: set[bytes] = set()
    for event in events:
        if isinstance(event, Stored | Removed):
            keys = {event.keys[at : at + 32] for at in range(0, len(event.keys), 32)}
            held = held | keys if isinstance(event, Stored) else held - keys
    return held


def test_a_snapshot_holds_what_the_events_before_it_told_and_nothing_of_those_behind_it() -> None:
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    replica = Replica(CacheConfig(num_pages=6, tokens_per_block=2, tells_events=True))
    told: list[StepTold] = []
    gate = Gate(told.append)
    driver = Driver(
        inbox,
        cast(Engine, WatchedEngine(replica, inbox)),
        Scheduler(SchedulerConfig(max_batch_size=1), replica, lambda request: SOURCE),
        Sampler(16, torch.device("cpu")),
        NoFollowers(),
        gate,
        Checks(1),
        Metrics(),
    )
    for number in range(1, 7):
        prompt = np.array([number, number, number, 1, 2], np.int32)
        options: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "stopping": Stopping(max_tokens=2)}
        inbox.put(Submit(Request(RequestKey(number), Phase.AGGREGATED, prompt, **options)))

    driver.run()
    assert told == [], "nothing leaves before it is agreed"
    gate.open(1_000)

    events: list[CacheEvent] = []
    compared = 0
    for step in told:
        for snapshot in step.kv_snapshots:
            assert keys_in(snapshot.stored) == keys_in(events)
            compared += 1
        events += step.kv_events
    assert compared > 8
    assert any(isinstance(event, Removed) for event in events)


def test_a_return_reaches_the_ranks_only_where_the_conversation_has_children_here() -> None:
    """Edges tell all workers that may hold some: those that do not make no plan for it."""
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    replica = Replica(CacheConfig(num_pages=6, tokens_per_block=2))
    replica.conversations.admitted("child", b"", "parent")
    scheduler = Scheduler(SchedulerConfig(), replica, lambda request: SOURCE)
    driver = Driver(
        inbox,
        cast(Engine, ScriptedEngine(replica, inbox)),
        scheduler,
        Sampler(16, torch.device("cpu")),
        NoFollowers(),
        Gate(lambda step: None),
        Checks(1),
        Metrics(),
    )
    for conversation in ("stranger", "parent", "child"):
        inbox.put(Returned(conversation, "turn"))
    inbox.put(Stop())

    driver.run()

    planned = scheduler.plan(0)
    assert planned is not None
    assert planned[0].acts == (plans.Returned("parent", "turn"),)
