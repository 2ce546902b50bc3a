"""A worker's real services for KV events, on an event loop of their own, behind a cache that the test changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import numpy as np

from edge.core.kv_index import Change, Removed, Stored
from edge.core.resident import Held
from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import model_pb2, server_pb2, service_pb2_grpc
from tests.edge.core.kv_caches import ModelCache
from worker.commands import KvSnapshot
from worker.core import events
from worker.core.outputs import LoadSnapshot
from worker.core.tiers import Tier
from worker.grpc_control import ControlService
from worker.kv_events import EventLog
from worker.link import LinkService
from worker.requests import Requests
from worker.telemetry import Metrics

TIERS = {Held.DEVICE: Tier.DEVICE, Held.HOST: Tier.HOST, Held.DISK: Tier.DISK}
BLOCK = 2
OPTIONS = (("grpc.so_reuseport", 0),)


class KvWorker:
    """One start of a worker: `instance_id` names it. `snapshots` counts those that it took."""

    stop: asyncio.Event
    model_name = "fake"
    role = "aggregated"

    def __init__(self, instance_id: str, *, max_batches: int = 100, on_loopback: bool = True) -> None:
        self.instance_id = instance_id
        self.abort_allowed = on_loopback
        self.cache = ModelCache()
        self.snapshots = 0
        self.metrics = Metrics()
        self.kv_events = EventLog(instance_id, max_batches, self._asked, self.metrics.kv_events)
        self.requests = Requests(lambda command: None, self.metrics)
        self.envelopes = cast(Any, self)
        self.loop: asyncio.AbstractEventLoop | None = None

    def _asked(self, ticket: int) -> None:
        asyncio.get_running_loop().call_soon(self._answer, ticket)

    def _answer(self, ticket: int) -> None:
        self.snapshots += 1
        held = [_event(change) for change in self.cache.snapshot()]
        stored = [one for one in held if isinstance(one, events.Stored)]
        self.kv_events.deliver([KvSnapshot(ticket, stored)], ())

    async def act(self, change: Callable[[ModelCache], Sequence[Change]]) -> None:
        """Change the cache and tell of it, on the loop that serves, where there is one."""
        await self.on_loop(lambda: self.kv_events.deliver((), [_event(one) for one in change(self.cache)]))

    async def store(self, *path: int) -> None:
        await self.act(lambda cache: cache.store(path))

    async def on_loop(self, call: Callable[[], None]) -> None:
        if self.loop is None:
            call()
            return

        async def called() -> None:
            call()

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self.loop))

    def require_link(self, envelope: str) -> None: ...

    async def until_ready(self) -> None: ...

    def is_starting(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True

    def checks(self) -> list[tuple[str, bool, str]]:
        return []

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(0, 0, 0, 0, 100)

    def link_load(self) -> link_pb2.Load:
        return link_pb2.Load()

    def step_number(self) -> int:
        return 0

    def server_info(self) -> server_pb2.ServerInfo:
        return server_pb2.ServerInfo(
            instance_id=self.instance_id,
            schema_revision=1,
            minimum_client_revision=1,
            capacity=server_pb2.DeploymentCapacity(kv_block_size=BLOCK),
        )

    def model_info(self) -> model_pb2.ModelInfo:
        generation = model_pb2.GenerationCapabilities(supports_cache_salt=True)
        return model_pb2.ModelInfo(max_context_length=4096, generation=generation)

    def welcome(self) -> link_pb2.Welcome:
        return link_pb2.Welcome(server=self.server_info(), model=self.model_info(), load=self.link_load())


@asynccontextmanager
async def serving(worker: KvWorker, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Its address. When this leaves, every stream is broken."""
    bound: Future[str] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(worker, address, bound)))
    thread.start()
    try:
        yield await asyncio.wrap_future(bound)
    finally:
        assert worker.loop is not None
        worker.loop.call_soon_threadsafe(worker.stop.set)
        await asyncio.to_thread(thread.join)


async def _serve(worker: KvWorker, address: str, bound: Future[str]) -> None:
    worker.loop, worker.stop = asyncio.get_running_loop(), asyncio.Event()
    server = grpc.aio.server(options=OPTIONS)
    service_pb2_grpc.add_ControlServicer_to_server(ControlService(cast(Any, worker)), server)
    link_pb2_grpc.add_EngineLinkServicer_to_server(LinkService(cast(Any, worker)), server)
    port = server.add_insecure_port(address)
    await server.start()
    bound.set_result(f"127.0.0.1:{port}")
    await worker.stop.wait()
    await server.stop(None)
    worker.loop = None


def _event(change: Change) -> events.CacheEvent:
    match change:
        case Stored():
            tokens = np.zeros(BLOCK * len(change.keys) // 32, np.int32)
            return events.Stored(change.parent, change.keys, TIERS[change.tier], tokens, change.begins)
        case Removed():
            return events.Removed(change.keys, TIERS[change.tier])
    return events.Cleared()
