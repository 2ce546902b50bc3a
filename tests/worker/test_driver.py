from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from worker.checks import Checks
from worker.commands import Cancel, Command, Pulled, Stop, Submit
from worker.core.config import CacheConfig
from worker.core.outputs import Finished, KvArrived
from worker.core.replica import Replica, StepWork
from worker.core.scheduler import Scheduler, SchedulerConfig
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
