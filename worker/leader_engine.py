"""Rank 0's engine thread: brings the group up, then drives it."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import structlog

from configuration.reading import SettingsError
from worker.addresses import Address
from worker.assembly import Assembly, Loaded
from worker.channel import NONCE_BYTES, Channel, ChannelError, Kind
from worker.checks import Checks
from worker.commands import Command, Copied, Pulled, Released
from worker.control import Facts, Leader, Setup, gather
from worker.control import Pulled as RankPulled
from worker.copy_board import CopyBoard
from worker.core.config import CacheConfig, RetentionPolicy, SchedulerConfig
from worker.core.ghosts import Ghosts
from worker.core.handoff import KvSource
from worker.core.networks import AllowedNetworks
from worker.core.recording import Failure, Header
from worker.core.scheduler import Scheduler
from worker.core.shards import kv_head_ranges
from worker.core.tiers import CopyEnded, CopyWork
from worker.core.types import Request, RequestKey
from worker.driver import Driver
from worker.exits import ExitCode
from worker.gate import Gate, StepTold
from worker.handoffs import Handoffs
from worker.intake import Served
from worker.loading import shared_file
from worker.model.sampling import Sampler
from worker.model.sharding import UnsupportedModel
from worker.place import Place
from worker.pulls import PullBoard
from worker.recorder import Recorder, open_recorder
from worker.service import Opened
from worker.settings import WorkerSettings
from worker.telemetry import Metrics
from worker.text import TextModel

log = structlog.get_logger()


class LeaderEngine(threading.Thread):
    """`on_opened`, `on_step` and `on_failed` are called on whichever thread has the news.

    `on_failed`: why, how this process should end, and the file in which what led there is recorded, if it is.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        place: Place,
        inbox: queue.SimpleQueue[Command],
        metrics: Metrics,
        instance_id: str,
        *,
        on_opened: Callable[[Opened], None],
        on_step: Callable[[StepTold], None],
        on_failed: Callable[[str, ExitCode, Path | None], None],
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._settings = settings
        self._place = place
        self._inbox = inbox
        self._metrics = metrics
        self._instance_id = instance_id
        self._on_opened = on_opened
        self._on_failed = on_failed
        self._gate = Gate(on_step)
        self._checks = Checks(place.world_size)
        self._pulls = PullBoard(place.world_size)
        self._copies = CopyBoard(place.world_size)
        self._boards_lock = threading.Lock()
        self._driver: Driver | None = None
        self._recorder: Recorder | None = None
        self._handoffs: Handoffs | None = None

    def run(self) -> None:
        try:
            self._live()
        except (UnsupportedModel, SettingsError) as error:
            self._on_failed(str(error), ExitCode.CONFIGURATION, None)
        except Exception as error:
            log.error("the engine failed", exc_info=error)
            self.failed(Failure(f"rank 0 failed: {error!r}"))
        if self._recorder is not None:
            self._recorder.close()

    def _live(self) -> None:
        place = self._place
        nonce = secrets.token_bytes(NONCE_BYTES)
        channels: Mapping[int, Channel] = {}
        if place.world_size > 1:
            with contextlib.closing(place.control_listener()) as listener:
                channels = gather(listener, place.token, nonce, place.world_size, self._settings.group.start_timeout_s)
        loaded = Loaded.load(self._settings, place, nonce)
        setup = Setup.agreed([loaded.facts, *(_facts(rank, channels[rank]) for rank in channels)])
        for channel in channels.values():
            channel.send(Kind.SETUP, msgspec.msgpack.encode(setup))
        assembly = loaded.open(
            setup, lambda pulled: self.pulled(0, pulled), lambda ended: self.copied(0, ended), self._released
        )
        endpoints = [assembly.engine.server.address]
        endpoints += [_expect(rank, channels[rank], Kind.READY).decode() for rank in channels]
        shared_file(place, nonce).unlink(missing_ok=True)
        with contextlib.closing(assembly):
            self._drive(assembly, channels, setup, endpoints)

    def _drive(self, assembly: Assembly, channels: Mapping[int, Channel], setup: Setup, endpoints: list[str]) -> None:
        engine = assembly.engine
        leader = Leader(
            channels,
            self,
            decisions=engine.decisions,
            overdue=self._overdue,
            report_timeout_s=self._settings.group.report_timeout_s,
        )
        cache = self._settings.kv_cache_config
        self._recorder = recorder = open_recorder(
            cache.recording_dir, cache.recording_max_bytes, self._header(engine.replica.config), self._metrics
        )
        if recorder is not None:
            recorder.start(engine.replica)
        layout = assembly.pool.layout
        self._metrics.cache.opened(tokens_per_block=layout.tokens_per_block, page_bytes=layout.page_bytes)
        policy = engine.replica.config.retention_policy
        ghosts = Ghosts(engine.replica) if cache.ghosts and policy is not RetentionPolicy.LRU else None
        self._driver = driver = Driver(
            self._inbox,
            engine,
            Scheduler(self._scheduler_config(), engine.replica, _source_of, ghosts),
            Sampler(assembly.facts.vocab_size, assembly.pool.tensor.device),
            leader,
            self._gate,
            self._checks,
            self._metrics,
            self.copying,
            recorder,
            ghosts,
        )
        self._handoffs = handoffs = Handoffs(
            engine.sessions,
            shape=assembly.shape,
            sources=_sources(assembly, endpoints),
            host_key=engine.server.host_key,
            instance_id=self._instance_id,
        )
        leader.start()
        self._on_opened(self._opened(assembly, setup, handoffs))
        try:
            driver.run()
        finally:
            leader.stop()

    def _header(self, config: CacheConfig) -> Header:
        settings, place = self._settings, self._place
        return Header(
            config=config,
            model=settings.model_name,
            role=settings.role,
            world_size=place.world_size,
            rank=place.rank,
            instance_id=self._instance_id,
            release=metadata.version("kinroute"),
        )

    def _opened(self, assembly: Assembly, setup: Setup, handoffs: Handoffs) -> Opened:
        capacity = setup.num_pages * self._settings.kv_cache_config.tokens_per_block
        facts = assembly.facts
        served = Served(
            model_name=self._settings.model_name,
            role=self._settings.role,
            vocab_size=facts.vocab_size,
            max_context_length=min(facts.max_context_length, capacity),
            eos_token_ids=facts.eos_token_ids,
            shape=assembly.shape,
            allowed_networks=AllowedNetworks(self._settings.kv_transfer.allowed_networks),
        )
        return Opened(served, handoffs, setup.num_pages, TextModel.load(self._settings.model))

    def _scheduler_config(self) -> SchedulerConfig:
        scheduler = self._settings.scheduler
        return SchedulerConfig(
            max_batch_size=scheduler.max_batch_size,
            max_num_tokens=scheduler.max_num_tokens,
            max_queued_requests=scheduler.max_queued_requests,
            handoff_timeout_ms=int(self._settings.kv_transfer.handoff_timeout_s * 1000),
            max_util_for_resume=self._settings.kv_cache_config.max_util_for_resume,
            idle_step_ms=self._settings.kv_cache_config.idle_step_ms,
        )

    def _overdue(self) -> str | None:
        limit_s = self._settings.group.step_timeout_s
        if self._driver is not None and self._driver.step_s > limit_s:
            return f"rank 0 has been in one step for more than {limit_s:.0f} s"
        return None

    def _released(self, session_id: str) -> None:
        key = self._handoffs.key_of(session_id) if self._handoffs is not None else None
        if key is not None:
            self._inbox.put(Released(key))

    # What the control channel has to say.

    def agreed(self, number: int) -> None:
        self._gate.open(number)

    def pulled(self, rank: int, pulled: RankPulled) -> None:
        key = RequestKey(pulled.request)
        with self._boards_lock:
            done = self._pulls.feed(rank, key, pulled.why)
        if done is not None:
            self._inbox.put(Pulled(key, done[0]))

    def copying(self, copies: Sequence[CopyWork]) -> None:
        """Before the plan that asks for them leaves."""
        if copies:
            with self._boards_lock:
                self._copies.began(copies)

    def copied(self, rank: int, ended: CopyEnded) -> None:
        with self._boards_lock:
            result = self._copies.feed(rank, ended)
        if result is not None:
            self._inbox.put(Copied(result))

    def checked(self, rank: int, answer: bytes) -> None:
        self._checks.feed(rank, msgspec.msgpack.decode(answer, type=dict[str, Any]))

    def failed(self, failure: Failure) -> None:
        if failure.plan is not None:
            self._metrics.count_mismatches()
        recording = self._recorder.fail(failure) if self._recorder is not None else None
        self._on_failed(failure.why, ExitCode.FAILED, recording)


def _facts(rank: int, channel: Channel) -> Facts:
    return msgspec.msgpack.decode(_expect(rank, channel, Kind.FACTS), type=Facts)


def _expect(rank: int, channel: Channel, wanted: Kind) -> bytes:
    frame = channel.receive()
    if frame is None:
        raise ChannelError(f"rank {rank} ended while it started")
    kind, payload = frame
    if kind is Kind.FAILED:
        raise ChannelError(f"rank {rank} failed: {payload.decode(errors='replace')}")
    if kind is not wanted:
        raise ChannelError(f"rank {rank} sent {kind.name} where {wanted.name} was due")
    return payload


def _sources(assembly: Assembly, endpoints: list[str]) -> list[KvSource]:
    """Where each rank serves its heads."""
    heads = kv_head_ranges(assembly.facts.num_kv_heads, len(endpoints))
    addresses = [Address.parse(endpoint) for endpoint in endpoints]
    return [KvSource(address.host, address.port, *span) for address, span in zip(addresses, heads, strict=True)]


def _source_of(request: Request) -> bytes:
    assert isinstance(request.kv_session, bytes), "a generation leg carries its session's bytes"
    return request.kv_session
