"""Brings up one rank's model and memory: device, communicator, weights, pages, and a first forward."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from configuration.reading import SettingsError
from worker.control import Facts
from worker.core.types import Batch, RequestKey
from worker.kv_settings import KvCacheConfig
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.model.communicator import Communicator, ProcessGroupCommunicator, SoloCommunicator
from worker.model.loader import LoadedModel, Progress, load
from worker.model.runner import ModelRunner
from worker.model.shared_memory import SharedMemoryCommunicator
from worker.place import Place
from worker.settings import WorkerSettings

HOST_CACHE_BYTES = 2 << 30
HOST_CACHE_FRACTION = 0.1
WARM_TOKENS = 16


def choose_device(settings: WorkerSettings, place: Place) -> torch.device:
    """`auto` is CUDA where there is one. Raises SettingsError where CUDA is asked for and there is too little of it."""
    found = torch.cuda.device_count() if settings.device != "cpu" and torch.cuda.is_available() else 0
    if settings.device == "cpu" or (settings.device == "auto" and not found):
        return torch.device("cpu")
    if place.local_rank >= found:
        raise SettingsError(
            f"device is {settings.device!r}, but this host has {found} GPUs for {place.world_size} ranks."
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def choose_dtype(settings: WorkerSettings, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, else float32."""
    if settings.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    able = torch.cpu.get_capabilities()
    is_able = device.type == "cuda" or able.get("avx512_bf16") or able.get("amx_bf16")
    return torch.bfloat16 if is_able else torch.float32


def shared_file(place: Place, group_nonce: bytes) -> Path:
    """What ranks of one host share their collectives through; the launcher removes what has its number."""
    name = hashlib.sha256(place.token + group_nonce).hexdigest()[:16]
    return Path("/dev/shm") / f"kinroute-{place.launcher_pid or 0}-{name}"  # noqa: S108 - named by a secret, mode 0600


def join_communicator(place: Place, device: torch.device, group_nonce: bytes, deadline_s: float) -> Communicator:
    """Every rank must call it."""
    if place.world_size == 1:
        return SoloCommunicator()
    if device.type == "cpu" and place.is_one_host:
        return SharedMemoryCommunicator(
            shared_file(place, group_nonce), place.rank, place.world_size, deadline_s=deadline_s
        )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{place.master_addr}:{place.master_port}",
        rank=place.rank,
        world_size=place.world_size,
    )
    return ProcessGroupCommunicator()


def load_model(
    settings: WorkerSettings, communicator: Communicator, device: torch.device, progress: Progress | None = None
) -> LoadedModel:
    torch.set_num_threads(settings.rank_threads)
    return load(settings.model, communicator, device, choose_dtype(settings, device), progress)


def layout_of(model: LoadedModel, config: KvCacheConfig) -> KvLayout:
    facts = model.facts
    return KvLayout(
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        tokens_per_block=config.tokens_per_block,
        dtype=facts.dtype,
        head_start=facts.kv_heads[0],
        head_stop=facts.kv_heads[1],
    )


def affordable_pages(config: KvCacheConfig, layout: KvLayout, device: torch.device) -> int:
    """How many pages this rank may have; the group takes the least of its ranks."""
    if config.max_tokens is not None:
        return config.max_tokens // config.tokens_per_block
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        budget = int(free_bytes * config.free_gpu_memory_fraction)
    else:
        budget = min(HOST_CACHE_BYTES, int(psutil.virtual_memory().available * HOST_CACHE_FRACTION))
    return max(1, budget // layout.page_bytes)


def share_of_tier(key: str, size: int, layout: KvLayout, world_size: int) -> int:
    """How many pages of a colder tier this rank may have: `size` bytes are for the whole worker, in equal shares.

    Ranks with fewer heads have smaller pages and could have more; the group takes the least of its ranks. Never looks
    at what is free: that is for the operator to know. Raises SettingsError where `size` is less than a page, naming
    `key`, which set it.
    """
    num_pages = size // world_size // layout.page_bytes
    if size and not num_pages:
        raise SettingsError(
            f"kv_cache_config.{key} is {size}: less than one page of {layout.page_bytes} bytes for each of "
            f"{world_size} ranks; set at least {layout.page_bytes * world_size}, or 0 for no such tier."
        )
    return num_pages


def facts_of(config: KvCacheConfig, layout: KvLayout, device: torch.device, world_size: int) -> Facts:
    """What this rank tells the group of its memory. Raises SettingsError."""
    return Facts(
        max_pages=affordable_pages(config, layout, device),
        max_host_pages=share_of_tier("host_cache_size", config.host_cache_size, layout, world_size),
        max_disk_pages=share_of_tier("disk_cache_size", config.disk_cache_size, layout, world_size),
    )


def warm_up(runner: ModelRunner, pool: DevicePool) -> None:
    """One small prefill and one decode step, on a page that nobody uses yet. Every rank must call it."""
    tokens = min(WARM_TOKENS, pool.layout.tokens_per_block)
    runner.run(_lone_sequence(0, tokens))
    runner.run(_lone_sequence(tokens - 1, tokens))


def _lone_sequence(start: int, stop: int) -> Batch:
    """Tokens [start, stop) of one sequence that lies in page 0."""
    positions = np.arange(start, stop, dtype=np.int32)
    return Batch(
        token_ids=np.zeros(stop - start, dtype=np.int32),
        positions=positions,
        slots=positions.astype(np.int64),
        query_starts=np.array([0, stop - start], dtype=np.int32),
        context_lens=np.array([stop], dtype=np.int32),
        page_table=np.zeros((1, 1), dtype=np.int32),
        sample_rows=np.array([stop - start - 1], dtype=np.int32),
        sample_requests=(RequestKey(0),),
    )
