"""Builds one rank's engine, step by step with its group. Runs on the engine thread."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import structlog
import torch

from configuration.reading import SettingsError
from configuration.tls import Watch
from worker.certificates import TransferCertificates
from worker.control import Facts, Pulled, Setup
from worker.core.config import CacheConfig, ReusePolicy
from worker.core.handoff import KvShape
from worker.core.replica import Replica
from worker.core.tiers import CopyEnded
from worker.engine import Engine
from worker.loading import (
    choose_device,
    facts_of,
    join_communicator,
    layout_of,
    load_model,
    warm_up,
)
from worker.memory.device import DevicePool
from worker.memory.disk import DiskError, DiskFile
from worker.memory.host import HostPool
from worker.memory.layout import KvLayout
from worker.memory.mover import Mover
from worker.memory.transfer.client import TransferClient
from worker.memory.transfer.server import TransferServer
from worker.model.communicator import Communicator
from worker.model.facts import ModelFacts
from worker.model.loader import LoadedModel
from worker.model.runner import ModelRunner
from worker.place import Place
from worker.session_keys import SessionKeys
from worker.settings import WorkerSettings

log = structlog.get_logger()


@dataclass(slots=True)
class Loaded:
    """A rank with its weights, before the group has agreed on the number of pages."""

    settings: WorkerSettings
    device: torch.device
    communicator: Communicator
    model: LoadedModel
    layout: KvLayout
    sessions: SessionKeys

    @classmethod
    def load(cls, settings: WorkerSettings, place: Place, group_nonce: bytes) -> Self:
        """Every rank must call it: it joins the group's communicator."""
        device = choose_device(settings, place)
        communicator = join_communicator(place, device, group_nonce, settings.group.step_timeout_s)
        model = load_model(settings, communicator, device)
        log.info(
            "the model is loaded", architecture=model.facts.architecture, dtype=model.facts.dtype, device=str(device)
        )
        return cls(
            settings,
            device,
            communicator,
            model,
            layout_of(model, settings.kv_cache_config),
            SessionKeys(place.token, group_nonce),
        )

    @property
    def facts(self) -> Facts:
        """Raises SettingsError where a tier cannot hold a page."""
        settings = self.settings
        return facts_of(settings.kv_cache_config, self.layout, self.device, settings.tensor_parallel_size)

    def open(
        self,
        setup: Setup,
        on_pulled: Callable[[Pulled], None],
        on_copied: Callable[[CopyEnded], None],
        on_released: Callable[[str], None] | None = None,
    ) -> Assembly:
        """Pages, transfer and a first forward. Every rank must call it with the same `setup`.

        `on_released`: on rank 0, hears of each session that its puller needs no more. Raises SettingsError where a tier
        cannot be had.
        """
        pool = DevicePool(self.layout, setup.num_pages, self.device)
        mover = self._mover(setup, pool, on_copied)
        runner = ModelRunner(self.model, self.communicator, pool)
        warm_up(runner, pool)
        transfer = self.settings.kv_transfer
        certificates = TransferCertificates.read(self.settings)
        server = TransferServer(pool, self.layout, transfer.listen_host, tls=certificates.server)
        if on_released is not None:
            server.on_release(on_released)
        server.start()
        engine = Engine(
            replica=Replica(self._cache_config(setup)),
            runner=runner,
            server=server,
            client=TransferClient(
                pool, self.layout, transfer.allowed_networks, transfer.timeout_s, certificates.client
            ),
            sessions=self.sessions,
            on_pulled=on_pulled,
            mover=mover,
        )
        # What was loaded stays: collections need not look at it again.
        gc.collect()
        gc.freeze()
        return Assembly(engine, pool, self.communicator, self.model.facts, Watch(certificates.all))

    def _mover(self, setup: Setup, pool: DevicePool, on_copied: Callable[[CopyEnded], None]) -> Mover | None:
        if not setup.num_host_pages and not setup.num_disk_pages:
            return None
        config = self.settings.kv_cache_config
        host = disk = None
        try:
            if setup.num_host_pages:
                host = HostPool(self.layout, setup.num_host_pages, self.device)
        except RuntimeError as error:
            size = setup.num_host_pages * self.layout.page_bytes
            raise SettingsError(
                f"kv_cache_config.host_cache_size asks for {size} bytes for this rank, which its host has not: {error}"
            ) from error
        try:
            if setup.num_disk_pages:
                assert config.disk_cache_path is not None, "settings with a disk tier name its folder"
                disk = DiskFile(config.disk_cache_path, setup.num_disk_pages, self.layout.page_bytes)
        except DiskError as error:
            raise SettingsError(f"kv_cache_config.disk_cache_path: {error}") from error
        return Mover(pool, host, disk, on_copied, deadline_s=config.copy_timeout_s)

    def _cache_config(self, setup: Setup) -> CacheConfig:
        config = self.settings.kv_cache_config
        reuse = config.block_reuse_config
        return CacheConfig(
            num_pages=setup.num_pages,
            tokens_per_block=config.tokens_per_block,
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
            policy=ReusePolicy(reuse.policy),
            max_tracked_conversations=config.max_tracked_conversations,
            num_host_pages=setup.num_host_pages,
            num_disk_pages=setup.num_disk_pages,
            cold_tier_offload_min_priority=config.cold_tier_offload_min_priority,
            retention_policy=config.chosen_retention_policy,
            finished_subagent_priority=reuse.finished_subagent_priority,
            finished_subagent_min_idle_iterations=reuse.finished_subagent_min_idle_iterations,
            max_offload_pages_per_plan=config.max_offload_pages_per_plan,
            max_onboard_pages_per_plan=config.max_onboard_pages_per_plan,
            tells_events=config.event_buffer_max_size > 0,
        )


@dataclass(slots=True)
class Assembly:
    """A rank that can serve. `close` frees what it holds; nothing of it may be used after that."""

    engine: Engine
    pool: DevicePool
    communicator: Communicator
    facts: ModelFacts
    watch: Watch

    @property
    def shape(self) -> KvShape:
        """What a worker that exchanges pages with this one must have in common with it."""
        layout = self.pool.layout
        return KvShape(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            tokens_per_block=layout.tokens_per_block,
            dtype=layout.dtype,
        )

    def close(self) -> None:
        if self.engine.mover is not None:
            self.engine.mover.close()
        self.watch.close()
        self.engine.client.close()
        self.engine.server.close()
        self.communicator.close()
        self.pool.close()
