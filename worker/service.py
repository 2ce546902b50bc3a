"""What this worker's servers answer from: the state of rank 0, kept on its event loop."""

from __future__ import annotations

import asyncio
import enum
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from enginelink.v1 import link_pb2
from openengine.v1 import model_pb2, server_pb2
from worker.affinity import AffinityHints
from worker.commands import Check, ClearCache, Command, Inspect, PinEnded, Rejected, TakeKvSnapshot, Told
from worker.core import inspection
from worker.core.outputs import Failed, HandoffReady, LoadSnapshot, TokenOut
from worker.core.replica import Replica
from worker.core.tiers import Tier
from worker.core.types import Phase, Request, Sampling, Stopping
from worker.gate import StepTold
from worker.handoffs import Handoffs
from worker.info import model_info, server_info
from worker.intake import Intake, Served
from worker.keys import WorkerKeys
from worker.kv_events import EventLog
from worker.lineage import Envelopes
from worker.requests import Active, Requests
from worker.session_proofs import GRACE_S, SessionProofs
from worker.settings import WorkerSettings
from worker.telemetry import Metrics
from worker.text import TextModel

EMPTY_LOAD = LoadSnapshot(0, 0, 0, 0, 0)

log = structlog.get_logger()


class State(enum.Enum):
    """STARTING --opened--> READY --drain--> DRAINING; any --fail--> FAILED"""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known once all ranks have loaded and are warm."""

    served: Served
    handoffs: Handoffs
    num_pages: int
    text: TextModel | None


class Service:
    """Rank 0's state. Everything but `post` runs on the event loop."""

    def __init__(self, settings: WorkerSettings, post: Callable[[Command], None]) -> None:
        self.metrics = Metrics()
        self.requests = Requests(post, self.metrics)
        self.requests.refusing = "the model is still being loaded"
        self.instance_id = secrets.token_hex(16)
        self.kv_events = EventLog(
            self.instance_id,
            settings.kv_cache_config.event_buffer_max_size,
            lambda ticket: post(TakeKvSnapshot(ticket)),
            self.metrics.kv_events,
        )
        self.keys = WorkerKeys(settings.keys_file)
        self.envelopes = Envelopes(self.keys, self.instance_id, required=not settings.listen.trusts_callers)
        self._proofs = SessionProofs(self.keys, settings.kv_transfer.handoff_timeout_s + GRACE_S)
        self._affinity = AffinityHints(settings.internal_request_auth_key_file)
        self.role = settings.role
        self.model_name = settings.model_name
        self.abort_allowed = settings.listen.trusts_callers
        self._settings = settings
        self._post = post
        self._state = State.STARTING
        self._why = ""
        self._opened: Opened | None = None
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._load = EMPTY_LOAD
        self._step = 0
        self._server: server_pb2.ServerInfo | None = None
        self._model: model_pb2.ModelInfo | None = None

    # What the rank tells it.

    def opened(self, opened: Opened) -> None:
        self._opened = opened
        self.intake = Intake(opened.served, self.envelopes, self._affinity, self._proofs)
        self.text = opened.text
        self._load = LoadSnapshot(0, 0, 0, 0, opened.num_pages)
        self._server = server_info(
            self._settings,
            version=metadata.version("kinroute"),
            instance_id=self.instance_id,
            num_pages=opened.num_pages,
            endpoints=opened.handoffs.endpoints,
        )
        self._model = model_info(self._settings, opened.served, reads_text=opened.text is not None)
        self.metrics.total_pages.set(opened.num_pages)
        self._state = State.READY
        self.requests.refusing = ""
        self._ready.set()

    def deliver(self, step: StepTold) -> None:
        self._step, self._load = step.number, step.load
        self.metrics.running.set(step.load.running)
        self.metrics.queued.set(step.load.queued)
        self.metrics.suspended.set(step.load.suspended)
        self.metrics.used_pages.set(step.load.used_pages)
        self.kv_events.deliver(step.kv_snapshots, step.kv_events)
        self.requests.deliver(step.told)
        if self._opened is not None:
            for told in step.told:
                if type(told) is PinEnded:
                    self._opened.handoffs.end(told.key)
        if self._state is State.DRAINING and not len(self.requests):
            self._idle.set()

    def fail(self, why: str) -> None:
        """The group is lost: every request ends, retryable, and none is accepted."""
        self._state, self._why = State.FAILED, why
        self.requests.fail_all(why)
        self._idle.set()

    async def drain(self) -> None:
        """Accept nothing more; return when nothing runs and no pages wait for anybody, or after the drain time."""
        if self._state is State.READY:
            self._state = State.DRAINING
        self.requests.refusing = "the worker is shutting down"
        if len(self.requests):
            try:
                async with asyncio.timeout(self._settings.drain_timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("requests are cut off", requests=len(self.requests))
                self.requests.fail_all("the worker is shutting down")

    # What servers ask.

    async def until_ready(self) -> None:
        await self._ready.wait()

    def is_starting(self) -> bool:
        return self._state is State.STARTING

    def is_ready(self) -> bool:
        return self._state is State.READY

    def is_live(self) -> bool:
        return self._state is not State.FAILED

    def checks(self) -> list[tuple[str, bool, str]]:
        """OpenEngine's names of what Health looks at: (name, good, why not)."""
        started = self._state is not State.STARTING
        return [
            ("grpc", True, ""),
            ("scheduler", self._state is State.READY, self._why or ("" if self.is_ready() else self._state.value)),
            ("model", started, "" if started else "loading"),
            ("kv_connector", started, "" if started else "starting"),
        ]

    def welcome(self) -> link_pb2.Welcome:
        return link_pb2.Welcome(server=self.server_info(), model=self.model_info(), load=self.link_load())

    def load(self) -> LoadSnapshot:
        return self._load

    def link_load(self) -> link_pb2.Load:
        load = self._load
        return link_pb2.Load(
            running_requests=load.running,
            queued_requests=load.queued,
            queued_tokens=load.queued_tokens,
            used_pages=load.used_pages,
            total_pages=load.total_pages,
            draining=self._state is State.DRAINING,
        )

    def step_number(self) -> int:
        return self._step

    def server_info(self) -> server_pb2.ServerInfo:
        assert self._server is not None, "asked before the worker was ready"
        return self._server

    def model_info(self) -> model_pb2.ModelInfo:
        assert self._model is not None, "asked before the worker was ready"
        return self._model

    def session_of(self, active: Active, output: HandoffReady) -> bytes:
        """The serialized KvSessionRef of a context leg that is ready."""
        assert self._opened is not None
        return self._opened.handoffs.begin(output, lambda ref: self._proofs.proven(ref, time.time()))

    def pinned_by(self, session_id: str) -> Active | None:
        assert self._opened is not None
        key = self._opened.handoffs.key_of(session_id)
        return None if key is None else self.requests.find_pinned(key)

    # What an operator asks.

    @property
    def registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def state(self) -> dict[str, Any]:
        load = self._load
        return {
            "state": self._state.value,
            "why": self._why,
            "instance_id": self.instance_id,
            "model": self.model_name,
            "role": self.role,
            "tensor_parallel_size": self._settings.tensor_parallel_size,
            "step": self._step,
            "running_requests": load.running,
            "queued_requests": load.queued,
            "used_pages": load.used_pages,
            "total_pages": load.total_pages,
            "tiers": {
                tier.name.lower(): asdict(pages) for tier, pages in zip(Tier, self.metrics.cache.pages, strict=False)
            },
        }

    async def leaks(self) -> dict[str, Any]:
        """What every rank holds, and what the servers do. `clean`: nothing at all."""
        ranks: list[dict[str, Any]] = await self._asked(Check)
        serving = {"requests": self.requests.running, "pins": self.requests.pinned, "queued": self._load.queued}
        clean = not any(serving.values()) and not any(value for rank in ranks for value in rank.values())
        return {
            "clean": clean,
            **serving,
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "ranks": ranks,
        }

    async def clear_cache(self, *, tenant: bytes | None = None, family: str | None = None) -> dict[str, Any]:
        """Forget what no request holds: of a salt, of a conversation and its descendants, or all."""
        await self._asked(lambda answer: ClearCache(answer, tenant, family))
        log.info("the cache is cleared", tenant=None if tenant is None else tenant.hex(), family=family)
        return {"cleared": True}

    async def families(self, *, family: str | None, limit: int) -> dict[str, Any]:
        """Conversations with what they own: all, or one and its descendants. `more`: there are more than `limit`."""
        found = await self._inspected(lambda replica: inspection.families(replica, family=family, limit=limit + 1))
        return {"step": self._step, "conversations": found[:limit], "more": len(found) > limit}

    async def dry_run(self, parent: str) -> dict[str, Any]:
        """What a return of `parent` would demote now, what stays, and why."""
        answer: dict[str, Any] = await self._inspected(lambda replica: inspection.dry_run(replica, parent))
        return answer

    async def block(self, key: bytes) -> dict[str, Any]:
        """Where the block with this key is, or why it is gone."""
        answer: dict[str, Any] = await self._inspected(lambda replica: inspection.block(replica, key))
        return answer

    async def _inspected(self, question: Callable[[Replica], Any]) -> Any:
        return await self._asked(lambda answer: Inspect(question, answer))

    async def _asked(self, command: Callable[[Callable[..., None]], Command]) -> Any:
        """Post what `command` makes of an answerer, and wait for its answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._post(command(_resolver(future)))
        return await future

    async def probe(self) -> str:
        """A tiny request of our own; returns why it failed, or nothing."""
        request = Request(
            key=self.requests.next_key(),
            phase=Phase.AGGREGATED,
            token_ids=np.zeros(1, np.int32),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=1),
            bypass_prefix_cache=True,
        )
        probe = Probe()
        active = self.requests.accept(request, f"probe-{self.instance_id}-{request.key}", probe)
        try:
            return await probe.done
        finally:
            self.requests.cancel(active)


class Probe:
    """Owns a probing request; `done` says why it failed, or nothing."""

    def __init__(self) -> None:
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def take(self, active: Active, output: Told) -> None:
        if self.done.done():
            return
        match output:
            case TokenOut():
                self.done.set_result("")
            case Failed():
                self.done.set_result(output.message)
            case Rejected():
                self.done.set_result(output.refused.message)

    def flush(self) -> None:
        return


def _resolver(future: asyncio.Future[Any]) -> Callable[..., None]:
    """Sets the result of `future` from another thread."""
    loop = future.get_loop()

    def resolve(*result: Any) -> None:
        loop.call_soon_threadsafe(_settle, future, result[0] if result else None)

    return resolve


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
