"""What decides how a rank's cache behaves: the same on every rank."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReusePolicy(enum.StrEnum):
    """What is committed: prompt and reply; the prompt alone; both, with an owner and a register of conversations."""

    ALL_REUSABLE = "all_reusable"
    PER_REQUEST = "per_request"
    PER_CONVERSATION = "per_conversation"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Numbers of pages are agreed by all ranks. `enable_block_reuse` False: nothing is committed.

    `enable_partial_reuse`: where a match ends inside a block, that block's page is copied and its common tokens are not
    computed again. They do not count as cached tokens: those are whole blocks that are shared.
    `cold_tier_offload_min_priority`: what leaves a tier below it is dropped, else it moves down.
    `finished_subagent_priority`: what a finished sub-agent's blocks get when its parent returns, None: nothing happens;
    `finished_subagent_min_idle_iterations`: plans since its last context request.
    `max_offload_pages_per_plan`, `max_onboard_pages_per_plan`: how many pages go down, and up, in one plan.
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
    tells_events: bool = False
