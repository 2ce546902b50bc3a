"""Fake workers as real processes, and a driver linked to them."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import grpc

from bench.fake_engine import answer_token
from edge.channels import Channels
from edge.core.errors import EdgeError
from edge.core.fleet import Fleet
from edge.core.lifecycle import Deadlines
from edge.core.routing import Router, RouterConfig
from edge.core.types import (
    ConversationKey,
    FamilyKey,
    FinishReason,
    Lineage,
    Principal,
    SamplingOptions,
    StopOptions,
    TokenLogprob,
    Turn,
    TurnId,
    Usage,
    WorkerId,
)
from edge.driver import Driver
from edge.hints import Hints
from edge.legs import Connection
from edge.signing import EnvelopeSigner
from edge.worker_either import EitherWorker
from edge.worker_link import WorkerLink
from edge.worker_openengine import OpenEngineWorker
from openengine.v1 import server_pb2, service_pb2_grpc

WAIT_S = 20.0
MODEL = "fake"
Protocol = Literal["enginelink", "openengine", "either"]


@contextmanager
def fake_worker(*arguments: str, listen: str = "127.0.0.1:0") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address and its process, which ends with the block."""
    command = [sys.executable, "-m", "bench.fake_worker", "--listen", listen, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["grpc"], process
        finally:
            process.kill()


@dataclass
class Heard:
    """A sink that keeps what it is told."""

    cached: int | None = None
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    usage: Usage | None = None
    error: EdgeError | None = None
    first: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def started(self, cached_tokens: int) -> None:
        self.cached = cached_tokens

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        assert not self.over.is_set(), "tokens after the end"
        self.token_ids.extend(ids)
        self.first.set()

    def judged(self, reason: FinishReason) -> FinishReason:
        return reason

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        assert not self.over.is_set(), "a second end"
        self.reason, self.usage = reason, usage
        self.over.set()

    def failed(self, error: EdgeError) -> None:
        assert not self.over.is_set(), "a second end"
        self.error = error
        self.over.set()

    async def wait(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.over.wait()


def make_turn(
    *,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    family: str = "f",
    turn: str = "t",
    lineage: Lineage | None = None,
) -> Turn:
    return Turn(
        turn_id=TurnId(turn),
        model=MODEL,
        token_ids=b"".join(token.to_bytes(4, "little") for token in prompt),
        sampling=SamplingOptions(temperature=0.0),
        stops=StopOptions(max_tokens),
        principal=Principal("tenant", "subject", frozenset()),
        lineage=lineage or Lineage(ConversationKey(family), FamilyKey(family)),
        cache_salt=b"salt",
    )


def answer_to(turn: Turn) -> list[int]:
    return [answer_token(turn.token_ids, number) for number in range(turn.stops.max_tokens)]


def connection(address: str, protocol: Protocol, fleet: Fleet, hints: Hints | None = None) -> Connection:
    worker_id = WorkerId(address)
    hints = hints or Hints(EnvelopeSigner("edge-under-test", ()))
    link = WorkerLink(worker_id, "edge-under-test", fleet, hints, Channels())
    openengine = OpenEngineWorker(worker_id, MODEL, fleet, hints, Channels())
    match protocol:
        case "enginelink":
            return link
        case "openengine":
            return openengine
        case "either":
            return EitherWorker(link, openengine)


@asynccontextmanager
async def linked_driver(
    context: Sequence[str],
    generation: Sequence[str],
    *,
    protocol: Protocol = "enginelink",
    deadlines: Deadlines | None = None,
    wait: bool = True,
    hints: Hints | None = None,
) -> AsyncIterator[Driver]:
    """Linked to every worker when this enters (unless told not to wait); no task of it runs when it leaves."""
    before = asyncio.all_tasks()
    fleet = Fleet(context, generation)
    connections = [connection(worker_id, protocol, fleet, hints) for worker_id in fleet.workers]
    driver = Driver(fleet, Router(RouterConfig(), fleet), connections, deadlines)
    task = asyncio.create_task(driver.run())
    try:
        await until(lambda: not wait or all(worker.ready for worker in fleet.workers.values()))
        yield driver
        assert not task.done(), f"the driver ended: {task}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # grpc's calls must be gone before their event loop is.
        gc.collect()
        await until(lambda: asyncio.all_tasks() <= before)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def until_idle(address: str) -> None:
    """Until the worker there has no request and no pinned pages."""
    async with asyncio.timeout(WAIT_S), grpc.aio.insecure_channel(address) as channel:
        control = service_pb2_grpc.ControlStub(channel)
        while True:
            load: server_pb2.LoadInfo = await control.GetLoad(server_pb2.GetLoadRequest())
            if not load.running_requests and not load.active_kv_sessions:
                return
            await asyncio.sleep(0.01)
