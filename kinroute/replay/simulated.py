"""A worker without a model: the very scheduler and replicas, with tokens from a recording and time that is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kinroute.replay.arm import STEP_MS, Arm
from kinroute.replay.copying import Copying
from kinroute.replay.ranks import Ranks
from worker.core.config import CacheConfig, RetentionPolicy, ReusePolicy, SchedulerConfig
from worker.core.conversations import StopReason
from worker.core.ghosts import Ghosts
from worker.core.outputs import Output
from worker.core.plan import Plan
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.step_work import StepWork
from worker.core.types import Phase, Request, RequestKey, Sampled, Sampling

PLENTY = 1 << 40
GREEDY = Sampling(temperature=0.0)
NO_TOKENS = Sampled((), ())
REASONS = {"tool": StopReason.TOOL_CALL, "end": StopReason.END_OF_TURN, None: StopReason.UNKNOWN}
PHASES = {"context": Phase.CONTEXT, "aggregated": Phase.AGGREGATED}


class Planned(NamedTuple):
    plan: Plan
    work: StepWork


def cache_config(arm: Arm, block_tokens: int) -> CacheConfig:
    """Of a worker with this arm's policy. Raises ValueError where no worker has it.

    A block that a match ends in is not copied in part: that changes no hit, and costs time.
    """
    policy = RetentionPolicy(arm.policy)
    return CacheConfig(
        num_pages=arm.capacity_blocks,
        tokens_per_block=block_tokens,
        enable_partial_reuse=False,
        policy=ReusePolicy.PER_CONVERSATION,
        num_host_pages=arm.host_blocks,
        num_disk_pages=arm.disk_blocks,
        finished_subagent_priority=0 if policy is RetentionPolicy.SUBAGENT else None,
        retention_policy=policy,
    )


def scheduler_config(arm: Arm, num_requests: int) -> SchedulerConfig:
    """The closed loop has a worker's limits; in the open one nothing queues for compute."""
    limits = (arm.costs.max_batch_size, arm.costs.max_num_tokens) if arm.closed_loop else (num_requests, PLENTY)
    return SchedulerConfig(
        max_batch_size=limits[0],
        max_num_tokens=limits[1],
        max_queued_requests=5 * num_requests,
        handoff_timeout_ms=60_000,
        idle_step_ms=STEP_MS,
    )


class SimulatedWorker:
    """Rank 0, the ranks that follow it, and copies that take their time. Times are in milliseconds."""

    def __init__(self, arm: Arm, block_tokens: int, num_requests: int) -> None:
        config = cache_config(arm, block_tokens)
        self.replica = Replica(config)
        self.ghosts = None if arm.policy == RetentionPolicy.LRU else Ghosts(self.replica)
        self.scheduler = Scheduler(
            scheduler_config(arm, num_requests),
            self.replica,
            lambda request: b"",
            self.ghosts,
        )
        self._ranks = Ranks(config, arm.tp - 1)
        self._copying = Copying(arm.host_rate, arm.disk_rate)
        self._plan: Plan | None = None

    def submit(self, request: Request) -> bool:
        """False: it can never run here."""
        return self.scheduler.submit(request) is None

    def plan(self, now_ms: float) -> Planned | None:
        """The next step; None: there is nothing to do. Raises RanksDiffer."""
        for number, good in self._copying.ended(now_ms):
            self.scheduler.copied(number, good)
        planned = self.scheduler.plan(int(now_ms))
        if planned is None:
            return None
        plan, work = planned
        self._plan = plan
        if work.copies:
            self._copying.begin(now_ms, work.copies)
        self._ranks.send(plan, self.replica.digest)
        return Planned(plan, work)

    def complete(self, keys: Sequence[RequestKey] = (), token_ids: Sequence[int] = ()) -> list[Output]:
        """These tokens are sampled: any number of a request, as by speculation. Some plan was made before."""
        assert self._plan is not None, "tokens before there was a step"
        return self.scheduler.complete(self._plan, Sampled(tuple(keys), tuple(token_ids)) if keys else NO_TOKENS)

    @property
    def next_ms(self) -> float | None:
        """When there is something to do even if nobody asks for anything."""
        wake_ms, copied_ms = self.scheduler.next_wake_ms, self._copying.next_ms
        if wake_ms is None or copied_ms is None:
            return copied_ms if wake_ms is None else wake_ms
        return min(wake_ms, copied_ms)

    def end(self) -> None:
        """No plan follows. Raises RanksDiffer."""
        self._ranks.end()
