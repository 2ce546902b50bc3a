"""The engine thread of rank 0: plans a step, has every rank run it, samples, and tells what came of it.

torch runs on this thread only. Everything else talks to it through its inbox, which wakes it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from worker.checks import Checks
from worker.commands import (
    Cancel,
    Check,
    ClearCache,
    Command,
    Copied,
    Heard,
    Inspect,
    KvSnapshot,
    PinEnded,
    Pulled,
    Rejected,
    Released,
    Returned,
    Stop,
    Submit,
    TakeKvSnapshot,
    Told,
)
from worker.copy_board import CopyResult
from worker.core import plan as plans
from worker.core.config import RetentionPolicy
from worker.core.demotion import descendants
from worker.core.events import CacheEvent
from worker.core.ghosts import Ghosts
from worker.core.outputs import Failed, Finished, HandoffReady, KvArrived, LoadSnapshot
from worker.core.plan import Plan
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.step_load import load_of
from worker.core.step_work import StepWork
from worker.core.tiers import CopyWork, Tier
from worker.core.types import Request, RequestKey, Sampled
from worker.engine import Engine
from worker.gate import Gate, StepTold
from worker.model.sampling import Sampler
from worker.refusal import Refused
from worker.telemetry import Metrics

NOTHING = Sampled((), ())

log = structlog.get_logger()


class Followers(Protocol):
    """The other ranks, as the driver reaches them."""

    def send_plan(self, number: int, encoded: bytes) -> None: ...
    def applied(self, number: int, digest: bytes) -> None: ...
    def ask_check(self) -> None: ...


class Recording(Protocol):
    """What is kept of the plans."""

    def record(self, plan: bytes, digest: bytes) -> None: ...
    def rest(self, replica: Replica) -> None: ...


class Driver:
    """`run` is the thread's whole life."""

    def __init__(
        self,
        inbox: queue.SimpleQueue[Command],
        engine: Engine,
        scheduler: Scheduler,
        sampler: Sampler,
        followers: Followers,
        gate: Gate,
        checks: Checks,
        metrics: Metrics,
        on_copies: Callable[[Sequence[CopyWork]], None] = lambda copies: None,
        recording: Recording | None = None,
        ghosts: Ghosts | None = None,
    ) -> None:
        """`on_copies`: hears of each step's copies between tiers before any rank can report on them. `ghosts`: those of
        the scheduler, if it has any."""
        self._inbox = inbox
        self._engine = engine
        self._scheduler = scheduler
        self._sampler = sampler
        self._followers = followers
        self._gate = gate
        self._checks = checks
        self._metrics = metrics
        self._on_copies = on_copies
        self._recording = recording
        self._ghosts = ghosts
        self._policy = engine.replica.retention_policy
        metrics.retention.kept_by(self._policy)
        self._sources: dict[RequestKey, bytes] = {}
        self._told: list[Told] = []
        self._snapshots: list[KvSnapshot] = []
        self._load: LoadSnapshot | None = None
        self._number = 0
        self._began_s: float | None = None

    @property
    def step_s(self) -> float:
        """How long the running step has taken, 0 between steps. For any thread."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def run(self) -> None:
        """Until Stop."""
        idle = False
        while self._take_commands(wait=idle):
            planned = self._scheduler.plan(_now_ms())
            idle = planned is None
            if planned is not None:
                self._began_s = time.monotonic()
                self._step(*planned)
                self._metrics.steps.observe(self.step_s)
                batch = planned[1].batch
                if batch is not None:
                    self._metrics.count_forward(load_of(batch), self.step_s)
                self._began_s = None
                if self._recording is not None:
                    self._recording.rest(self._engine.replica)
            elif self._told or self._snapshots:
                self._tell()

    def _step(self, plan: Plan, work: StepWork) -> None:
        self._number = plan.number
        self._on_copies(work.copies)
        encoded = plans.encode(plan)
        self._followers.send_plan(plan.number, encoded)
        if self._recording is not None:
            self._recording.record(encoded, self._engine.replica.digest)
        self._told += [PinEnded(key) for key in self._engine.begin(work)]
        self._followers.applied(plan.number, self._engine.replica.digest)
        logits = self._engine.forward(work)
        sampled = NOTHING
        if work.batch is not None and logits is not None:
            sampled = self._sampler.sample(work.batch.sample_requests, logits)
            self._metrics.output_tokens.inc(len(sampled.requests))
        for output in self._scheduler.complete(plan, sampled):
            match output:
                case KvArrived():
                    self._engine.release(self._sources.pop(output.key))
                case HandoffReady() | Finished() | Failed():
                    self._forget(output.key)
            self._told.append(output)
        cache = self._engine.replica.cache
        self._metrics.cache.watch(cache.stats, [cache.pools.counts(tier) for tier in Tier])
        if self._ghosts is not None:
            self._metrics.retention.watch(self._ghosts.uncached)
            self._follow_policy()
        self._tell(work.events)

    def _follow_policy(self) -> None:
        """Say so where the guard has changed it."""
        policy = self._engine.replica.retention_policy
        if policy is self._policy:
            return
        self._policy = policy
        self._metrics.retention.kept_by(policy)
        if policy is RetentionPolicy.LRU:
            log.warning("lru would have cached more than the retention policy: blocks are kept by lru", now=policy)
        else:
            log.warning("the retention policy is tried again", now=policy)

    def _tell(self, events: Sequence[CacheEvent] = ()) -> None:
        told, self._told = self._told, []
        snapshots, self._snapshots = self._snapshots, []
        load = self._scheduler.load
        if told or snapshots or events or load != self._load:
            self._load = load
            self._gate.hold(StepTold(self._number, told, load, snapshots, events))

    def _take_commands(self, *, wait: bool) -> bool:
        """Everything in the inbox; waits for the first if told to. False after Stop."""
        try:
            command = self._inbox.get(timeout=self._sleep_s()) if wait else self._inbox.get_nowait()
            while self._take(command):
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _sleep_s(self) -> float | None:
        wake_ms = self._scheduler.next_wake_ms
        return None if wake_ms is None else max(0.0, (wake_ms - _now_ms()) / 1000)

    def _take(self, command: Command) -> bool:
        match command:
            case Submit():
                self._submit(command.request)
            case Cancel():
                # Its source is forgotten with what it still tells: its pages may just have arrived.
                self._scheduler.cancel(command.key)
                self._sampler.remove(command.key)
            case Pulled(why=None):
                self._scheduler.pulled(command.key)
            case Pulled():
                self._scheduler.pull_failed(command.key, command.why or "")
            case Copied():
                self._copied(command.result)
            case Released():
                self._scheduler.released(command.key)
            case Heard() | Returned():
                self._hear(command)
            case Check():
                self._checks.begin(command.answer)
                self._followers.ask_check()
                self._checks.feed(0, self._engine.held())
            case ClearCache():
                self._scheduler.clear(command.tenant, self._owners(command.family))
                command.answer()
            case Inspect():
                command.answer(command.question(self._engine.replica))
            case TakeKvSnapshot():
                self._snapshots.append(KvSnapshot(command.ticket, self._engine.replica.cache.tree.snapshot()))
            case Stop():
                return False
        return True

    def _hear(self, told: Heard | Returned) -> None:
        if isinstance(told, Heard):
            self._scheduler.heard(told.conversation, told.news, told.reason, final=told.final)
        elif self._engine.replica.conversations.has_children(told.conversation):
            # Others cost no plan: edges tell all workers that may hold children.
            self._scheduler.returned(told.conversation, told.turn)

    def _copied(self, result: CopyResult) -> None:
        self._scheduler.copied(result.number, result.good)
        for rank, why in result.failures:
            self._metrics.cache.copy_failed(result.tier, rank)
            log.warning("a copy between tiers failed", tier=result.tier.name, rank=rank, why=why)
        if result.off:
            self._scheduler.tier_failed(result.tier)
            log.error("a tier is switched off: it failed too often on one rank", tier=result.tier.name)

    def _submit(self, request: Request) -> None:
        rejection = self._scheduler.submit(request)
        if rejection is not None:
            refused = Refused.named(rejection.code, rejection.message, retryable=rejection.retryable)
            self._told.append(Rejected(request.key, refused))
            return
        self._sampler.add(request)
        if isinstance(request.kv_session, bytes):
            self._sources[request.key] = request.kv_session

    def _owners(self, family: str | None) -> tuple[str, ...] | None:
        """A conversation and its descendants, as they are now."""
        if family is None:
            return None
        below = descendants(self._engine.replica.conversations, family)
        return (*(one.id for one in below), family)

    def _forget(self, key: RequestKey) -> None:
        self._sampler.remove(key)
        self._sources.pop(key, None)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
