"""What ghosts add to the CPU of a worker's steps: the scheduler with and without them, turn about, at long prompts.

Agents of 142,000 tokens each add 2,000 a turn and answer 64; all of them run at once, so that a step decodes for all.
A step's CPU is the scheduler's alone here: launching a forward pass comes on top of it and makes the share smaller.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.core.config import CacheConfig, RetentionPolicy, ReusePolicy, SchedulerConfig
from worker.core.conversations import News, StopReason
from worker.core.ghosts import Ghosts
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.types import Phase, Request, RequestKey, Sampled, Sampling, Stopping

AGENTS = 8
PROMPT_TOKENS = 142_000
NEW_TOKENS = 2_000
ANSWER_TOKENS = 64
TURNS = 8
BLOCK = 32
VOCABULARY = 150_000
POLICIES = (RetentionPolicy.SUBAGENT, RetentionPolicy.RETURN_INDEX)


@dataclass
class _Worker:
    """`step_s`: CPU of each step. `prompts`: of each agent, as long as they will be."""

    prompts: list[np.ndarray[Any, np.dtype[np.int32]]]
    policy: RetentionPolicy
    with_ghosts: bool
    step_s: list[float] = field(default_factory=list)
    now_ms: int = 0
    key: int = 0

    def __post_init__(self) -> None:
        blocks = sum(len(prompt) for prompt in self.prompts) // BLOCK
        replica = Replica(
            CacheConfig(
                num_pages=blocks * 3 // 4,
                tokens_per_block=BLOCK,
                policy=ReusePolicy.PER_CONVERSATION,
                finished_subagent_priority=0 if self.policy is RetentionPolicy.SUBAGENT else None,
                retention_policy=self.policy,
            )
        )
        ghosts = Ghosts(replica) if self.with_ghosts else None
        limits = SchedulerConfig(max_num_tokens=8192)
        self.scheduler = Scheduler(limits, replica, lambda request: b"", ghosts)

    def turn(self, number: int) -> None:
        """Half of the agents ask once more, and are answered."""
        for agent in range(number % 2, len(self.prompts), 2):
            self.key += 1
            request = Request(
                key=RequestKey(self.key),
                phase=Phase.AGGREGATED,
                token_ids=self.prompts[agent][: PROMPT_TOKENS + number * NEW_TOKENS],
                sampling=Sampling(temperature=0.0),
                stopping=Stopping(max_tokens=ANSWER_TOKENS),
                conversation=f"agent {agent}",
                turn=str(number),
            )
            assert self.scheduler.submit(request) is None
        while self._step():
            pass
        for agent in range(number % 2, len(self.prompts), 2):
            self.scheduler.heard(f"agent {agent}", News.ENDED, StopReason.TOOL_CALL, final=False)

    def _step(self) -> bool:
        began_s = time.thread_time()
        made = self.scheduler.plan(self.now_ms)
        if made is None:
            return False
        plan, work = made
        keys = work.batch.sample_requests if work.batch is not None else ()
        self.scheduler.complete(plan, Sampled(keys, (1,) * len(keys)))
        self.step_s.append(time.thread_time() - began_s)
        self.now_ms += 30
        return True


def run(agents: int = AGENTS, turns: int = TURNS) -> dict[str, Any]:
    """A row by policy: the median and mean step without ghosts, and what they add on the mean."""
    dice = np.random.default_rng(1)
    length = PROMPT_TOKENS + turns * NEW_TOKENS
    prompts = [dice.integers(0, VOCABULARY, length).astype(np.int32) for _ in range(agents)]
    return {"agents": agents, "turns": turns, "rows": [_row(policy, prompts, turns) for policy in POLICIES]}


def _row(policy: RetentionPolicy, prompts: list[np.ndarray[Any, np.dtype[np.int32]]], turns: int) -> dict[str, Any]:
    pair = [_Worker(prompts, policy, with_ghosts) for with_ghosts in (False, True)]
    for number in range(turns):
        for one in pair if number % 2 else pair[::-1]:
            one.turn(number)
    without, with_ghosts = (statistics.mean(one.step_s) * 1e6 for one in pair)
    requests = pair[0].key
    return {
        "policy": str(policy),
        "steps": len(pair[0].step_s),
        "step_us": without,
        "step_median_us": statistics.median(pair[0].step_s) * 1e6,
        "with_ghosts_us": with_ghosts,
        "added_us_per_step": with_ghosts - without,
        "added_us_per_request": (with_ghosts - without) * len(pair[0].step_s) / requests,
        "share_of_scheduler": with_ghosts / without - 1,
    }
