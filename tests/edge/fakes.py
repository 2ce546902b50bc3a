"""Fake workers as real processes, and a driver linked to them."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from bench.fake_engine import answer_token
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
from edge.signing import EnvelopeSigner
from edge.worker_link import WorkerLink

WAIT_S = 20.0


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


def make_turn(*, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8, family: str = "f", turn: str = "t") -> Turn:
    return Turn(
        turn_id=TurnId(turn),
        model="fake",
        token_ids=b"".join(token.to_bytes(4, "little") for token in prompt),
        sampling=SamplingOptions(temperature=0.0),
        stops=StopOptions(max_tokens),
        principal=Principal("tenant", "subject", frozenset()),
        lineage=Lineage(ConversationKey(family), FamilyKey(family)),
        cache_salt=b"salt",
    )


def answer_to(turn: Turn) -> list[int]:
    return [answer_token(turn.token_ids, number) for number in range(turn.stops.max_tokens)]


@asynccontextmanager
async def linked_driver(
    context: Sequence[str], generation: Sequence[str], *, deadlines: Deadlines | None = None, wait: bool = True
) -> AsyncIterator[Driver]:
    """Linked to every worker when this enters (unless told not to wait); nothing runs when it leaves."""
    fleet = Fleet(context, generation)
    signer = EnvelopeSigner("edge-under-test", ())
    links = [WorkerLink(WorkerId(worker), "edge-under-test", fleet, signer) for worker in fleet.workers]
    driver = Driver(fleet, Router(RouterConfig(), fleet), links, deadlines)
    task = asyncio.create_task(driver.run())
    try:
        async with asyncio.timeout(WAIT_S):
            while wait and not all(worker.ready for worker in fleet.workers.values()):
                await asyncio.sleep(0.01)
        yield driver
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # grpc's calls must be gone before their event loop is.
        gc.collect()
        await asyncio.sleep(0)
