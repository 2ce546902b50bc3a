"""`kv_cache_config` of a worker: what its cache may hold, where, for how long, and what it leaves behind.

Names that users of TensorRT-LLM know are kept. Sizes in bytes are numbers, or text such as "4GiB".
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from configuration.reading import Section, SettingsError
from configuration.sizes import Bytes
from worker.core.config import RetentionPolicy
from worker.core.types import DEFAULT_PRIORITY, MAX_PRIORITY


def _no_window(value: int | None) -> int | None:
    if value is not None:
        raise ValueError(
            "must be left at its default, null: it acts on sliding windows only, and here sliding-window layers keep "
            "their pages and mask"
        )
    return value


Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Priority = Annotated[int, Field(strict=True, ge=0, le=MAX_PRIORITY)]
Share = Annotated[float, Field(strict=True, gt=0.0, le=1.0)]


class BlockReuseConfig(Section):
    """`policy`: what may be used again. `all_reusable`: prompts and replies; `per_request`: prompts alone;
    `per_conversation`: both, with an owner for each block and a register of conversations.

    `finished_subagent_priority`: what the blocks of a finished sub-agent get when its parent returns; null is off.
    `finished_subagent_min_idle_iterations`: how many steps ago its last context must have ended.
    """

    policy: Literal["all_reusable", "per_request", "per_conversation"] = "all_reusable"
    max_num_turns: Annotated[int | None, AfterValidator(_no_window)] = None
    finished_subagent_priority: Annotated[int, Field(strict=True, ge=0, le=DEFAULT_PRIORITY)] | None = None
    finished_subagent_min_idle_iterations: CountOrZero = 32


class KvCacheConfig(Section):
    """`max_tokens` sizes the device tier; without it, a CUDA device gives `free_gpu_memory_fraction` of what weights
    leave, and a CPU at most 2 GiB and a tenth of the free memory.

    `host_cache_size`, `disk_cache_size`: bytes of the colder tiers of the whole worker, its ranks in equal shares; 0 is
    none. `disk_cache_path`: the folder of the disk tier's files, which are emptied at every start.
    `cold_tier_offload_min_priority`: an evicted block below it is dropped, at or above it moves to a colder tier.
    `max_util_for_resume`: a suspended request is admitted again only while pages in use stay under this share.
    `max_offload_pages_per_plan`, `max_onboard_pages_per_plan`: how many pages one step may begin to move colder, and
    back. `copy_timeout_s`: a copy that takes longer has failed.
    `event_buffer_max_size`: batches of KV events kept for those who follow them; 0 sends none.
    `retention_policy`: who leaves first. `lru`: who was used longest ago; `subagent`: finished sub-agents first;
    `return_index`: who is least likely to be asked for again, as the worker has learned. Null is `subagent` where
    `finished_subagent_priority` is set, else `lru`. `ghosts`: count beside the real cache what `lru` would have found,
    and fall back to it while it does better.
    `idle_step_ms`: how often a worker with nothing to run makes a step while a sub-agent waits for its idle bound.
    `recording_max_bytes`: what the recordings of a worker may take; 0 is off. `recording_dir`: where they lie; without
    it, kinroute/recordings in the user's state folder.
    """

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    tokens_per_block: Annotated[int, Field(strict=True, ge=1, le=1024)] = 32
    max_tokens: Count | None = None
    free_gpu_memory_fraction: Annotated[float, Field(strict=True, gt=0.0, lt=1.0)] = 0.9
    host_cache_size: Bytes = 0
    disk_cache_size: Bytes = 0
    disk_cache_path: Path | None = None
    cold_tier_offload_min_priority: Priority = 30
    max_util_for_resume: Share = 0.95
    max_offload_pages_per_plan: Count = 256
    max_onboard_pages_per_plan: Count = 256
    copy_timeout_s: Annotated[float, Field(strict=True, gt=0.0, le=3600.0)] = 10.0
    event_buffer_max_size: CountOrZero = 1024
    max_tracked_conversations: Count = 65_536
    idle_step_ms: Annotated[int, Field(strict=True, ge=1, le=60_000)] = 30
    recording_max_bytes: Bytes = 256 << 20
    recording_dir: Path | None = None
    retention_policy: Literal["lru", "subagent", "return_index"] | None = None
    ghosts: bool = True
    block_reuse_config: BlockReuseConfig = BlockReuseConfig()

    @property
    def chosen_retention_policy(self) -> RetentionPolicy:
        """`retention_policy`, or without it what follows from `finished_subagent_priority`."""
        demotes = self.block_reuse_config.finished_subagent_priority is not None
        return RetentionPolicy(self.retention_policy or ("subagent" if demotes else "lru"))


def require_sense(config: KvCacheConfig, role: str) -> None:
    """What one key alone cannot show. Raises SettingsError."""
    if config.max_tokens is not None and config.max_tokens < config.tokens_per_block:
        raise SettingsError(
            f"kv_cache_config.max_tokens is {config.max_tokens}: less than one block of {config.tokens_per_block} "
            "tokens (kv_cache_config.tokens_per_block)."
        )
    _require_folders(config)
    _require_demotable(config, role)
    if config.retention_policy == "return_index":
        _require_returns(config, role)


def _require_folders(config: KvCacheConfig) -> None:
    if config.disk_cache_size and config.disk_cache_path is None:
        raise SettingsError(
            f"kv_cache_config.disk_cache_size is {config.disk_cache_size}, but kv_cache_config.disk_cache_path is not "
            "set: name the folder of the disk tier, or set disk_cache_size: 0."
        )
    for key, folder in (("disk_cache_path", config.disk_cache_path), ("recording_dir", config.recording_dir)):
        if folder is not None and not folder.is_dir():
            raise SettingsError(f"kv_cache_config.{key} is {str(folder)!r}: it must be a folder that exists.")


def _require_demotable(config: KvCacheConfig, role: str) -> None:
    reuse = config.block_reuse_config
    priority = reuse.finished_subagent_priority
    named = f"kv_cache_config.block_reuse_config.finished_subagent_priority is {priority}"
    policy = f"kv_cache_config.block_reuse_config.policy is {reuse.policy!r}"
    if priority is not None:
        if role == "generation":
            raise SettingsError(
                f"{named}, but role is 'generation': sub-agents are demoted where prompts are prefilled, and a "
                "generation worker evicts by lru; set it on the context or aggregated workers only."
            )
        if reuse.policy != "per_conversation":
            raise SettingsError(
                f"{named}, but {policy}: it needs policy: per_conversation, as only there blocks have owners."
            )
        if config.retention_policy == "lru":
            raise SettingsError(
                f"{named}, but kv_cache_config.retention_policy is 'lru', which demotes nothing: set retention_policy: "
                "subagent, or leave either out."
            )
        if not config.enable_block_reuse:
            raise SettingsError(
                f"{named}, but kv_cache_config.enable_block_reuse is false: nothing is kept that could be demoted."
            )
    elif config.retention_policy == "subagent":
        raise SettingsError(
            "kv_cache_config.retention_policy is 'subagent', but "
            "kv_cache_config.block_reuse_config.finished_subagent_priority is not set: nothing would be demoted; set "
            f"it to 0 to {DEFAULT_PRIORITY}, with policy: per_conversation, or set retention_policy: lru."
        )


def _require_returns(config: KvCacheConfig, role: str) -> None:
    named = "kv_cache_config.retention_policy is 'return_index'"
    policy = config.block_reuse_config.policy
    if role == "generation":
        raise SettingsError(
            f"{named}, but role is 'generation': a generation worker evicts by lru; set it on the context or "
            "aggregated workers only."
        )
    if policy != "per_conversation":
        raise SettingsError(
            f"{named}, but kv_cache_config.block_reuse_config.policy is {policy!r}: it needs policy: per_conversation, "
            "as only there the worker knows whose blocks are whose."
        )
    if not config.enable_block_reuse:
        raise SettingsError(
            f"{named}, but kv_cache_config.enable_block_reuse is false: nothing is kept that could be asked for again."
        )
