"""A scheduler with two ranks and no model: whatever is sampled is token 9, unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.core.config import CacheConfig, ReusePolicy, SchedulerConfig
from worker.core.outputs import Output, Rejection
from worker.core.plan import decode, encode
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.step_work import StepWork
from worker.core.tiers import CopyWork
from worker.core.types import Phase, Request, RequestKey, Sampled, Sampling, Stopping

ANSWER = 9


@dataclass
class TestEngine:
    """`works`: rank 0's work of each step. Every step is applied by the second rank too, whose digest must agree."""

    __test__ = False

    scheduler: Scheduler
    ranks: tuple[Replica, Replica]
    works: list[StepWork] = field(default_factory=list)
    now_ms: int = 0

    @property
    def replica(self) -> Replica:
        return self.ranks[0]

    @property
    def work(self) -> StepWork:
        return self.works[-1]

    def submit(self, key: int, prompt: Sequence[int], **members: Any) -> Rejection | None:
        return self.scheduler.submit(make_request(key, prompt, **members))

    def step(self, token: int = ANSWER) -> list[Output] | None:
        """One plan, applied by both ranks and completed; None where there was nothing to do."""
        made = self.scheduler.plan(self.now_ms)
        if made is None:
            return None
        plan, work = made
        self.works.append(work)
        follower = self.ranks[1]
        follower.apply(decode(encode(plan)))
        assert follower.digest == self.replica.digest
        self.check()
        return self.scheduler.complete(plan, self.sampled(work, token))

    @staticmethod
    def sampled(work: StepWork, token: int = ANSWER) -> Sampled:
        """`token` for everybody who samples in this step."""
        keys = work.batch.sample_requests if work.batch is not None else ()
        return Sampled(keys, (token,) * len(keys))

    def run(self, token: int = ANSWER) -> list[Output]:
        """Steps until there is nothing to do; what they told."""
        told: list[Output] = []
        while (outputs := self.step(token)) is not None:
            told += outputs
        return told

    def run_some(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def end_copies(self, good: int | None = None) -> list[CopyWork]:
        """Every copy that runs is over on both ranks, with the next plan; its first `good` pages arrived, or all."""
        ended = [copy.work for copy in self.replica.cache.pools.copies.running.values()]
        for work in ended:
            pages = len(work.targets)
            self.scheduler.copied(work.number, pages if good is None else min(good, pages))
        return ended

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def batch_keys(self) -> list[int]:
        """Requests that sampled in the last step."""
        batch = self.work.batch
        return [] if batch is None else list(batch.sample_requests)

    def computed(self) -> list[list[int]]:
        """Token ids of each sequence in the last step's forward."""
        batch = self.work.batch
        return [] if batch is None else [part.tolist() for part in np.split(batch.token_ids, batch.query_starts[1:-1])]


def make_engine(
    *,
    num_pages: int = 8,
    tokens_per_block: int = 2,
    max_batch_size: int = 8,
    max_num_tokens: int = 64,
    max_queued_requests: int = 64,
    handoff_timeout_ms: int = 100,
    enable_block_reuse: bool = True,
    enable_partial_reuse: bool = False,
    policy: ReusePolicy = ReusePolicy.ALL_REUSABLE,
    max_tracked_conversations: int = 100,
    **cache: Any,
) -> TestEngine:
    """`cache`: more members of CacheConfig."""
    config = CacheConfig(
        num_pages=num_pages,
        tokens_per_block=tokens_per_block,
        enable_block_reuse=enable_block_reuse,
        enable_partial_reuse=enable_partial_reuse,
        policy=policy,
        max_tracked_conversations=max_tracked_conversations,
        **cache,
    )
    ranks = (Replica(config), Replica(config))
    limits = SchedulerConfig(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_queued_requests=max_queued_requests,
        handoff_timeout_ms=handoff_timeout_ms,
    )
    return TestEngine(Scheduler(limits, ranks[0], lambda request: f"session {request.key}".encode()), ranks)


def make_request(
    key: int,
    prompt: Sequence[int],
    *,
    phase: Phase = Phase.AGGREGATED,
    max_tokens: int = 1,
    min_tokens: int = 0,
    stop: frozenset[int] = frozenset(),
    **members: Any,
) -> Request:
    return Request(
        key=RequestKey(key),
        phase=phase,
        token_ids=np.array(prompt, np.int32),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens, min_tokens, stop),
        **members,
    )
