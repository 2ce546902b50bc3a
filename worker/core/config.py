"""What decides how a rank's cache behaves: the same on every rank."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReusePolicy(enum.StrEnum):
    """What is committed: prompt and reply; the prompt alone; both, with an owner and a register of conversations."""

    ALL_REUSABLE = "all_reusable"
    PER_REQUEST = "per_request"
    PER_CONVERSATION = "per_conversation"


class RetentionPolicy(enum.StrEnum):
    """Who leaves first among blocks of one priority: who was used longest ago, under `lru` and `subagent`; who is least
    likely to be asked for again, under `return_index`. Under `subagent` finished sub-agents get a lower priority."""

    LRU = "lru"
    SUBAGENT = "subagent"
    RETURN_INDEX = "return_index"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Numbers of pages are agreed by all ranks. `enable_block_reuse` False: nothing is committed.

    `enable_partial_reuse`: where a match ends inside a block, that block's page is copied and its common tokens are not
    computed again. They do not count as cached tokens: those are whole blocks that are shared.
    `cold_tier_offload_min_priority`: what leaves a tier below it is dropped, else it moves down.
    `finished_subagent_priority`: what a finished sub-agent's blocks get when its parent returns, None: nothing happens;
    `finished_subagent_min_idle_iterations`: plans since its last context request.
    `max_offload_pages_per_plan`, `max_onboard_pages_per_plan`: how many pages go down, and up, in one plan.
    `retention_policy`: who leaves first among blocks of one priority; `return_index` needs `per_conversation`.
    `tells_events`: changes are collected for those who follow the cache from outside; nothing is decided by them.
    """

    num_pages: int
    tokens_per_block: int
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    policy: ReusePolicy = ReusePolicy.ALL_REUSABLE
    max_tracked_conversations: int = 65_536
    num_host_pages: int = 0
    num_disk_pages: int = 0
    cold_tier_offload_min_priority: int = 30
    finished_subagent_priority: int | None = None
    finished_subagent_min_idle_iterations: int = 32
    max_offload_pages_per_plan: int = 256
    max_onboard_pages_per_plan: int = 256
    retention_policy: RetentionPolicy = RetentionPolicy.LRU
    tells_events: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_batch_size`: requests that run at once; never more than `max_num_tokens`, so that each gets a token a step.

    `handoff_timeout_ms`: how long a context leg's pages wait for the generation side. `max_util_for_resume`: a
    suspended request is admitted again only while so much of the device's pages would be in use. `idle_step_ms`: how
    often an idle worker makes an empty plan while a finished sub-agent is too young to be demoted. `learning_plans`:
    after how many plans the ranks hear what the return index has learned.
    """

    max_batch_size: int = 64
    max_num_tokens: int = 2048
    max_queued_requests: int = 1024
    handoff_timeout_ms: int = 60_000
    max_util_for_resume: float = 0.95
    idle_step_ms: int = 30
    learning_plans: int = 256
