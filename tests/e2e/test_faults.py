"""Real workers that are killed while they serve: who waits, who goes on, and that the group comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.system import Part, System
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.anyio]

WAIT_S = 60.0
STREAMS = 16
TOKENS = 160
PATIENCE = {"report_timeout_s": 5.0, "step_timeout_s": 5.0}


@dataclass(frozen=True)
class Running:
    system: System
    edge: Part
    context: list[Part]
    generation: list[Part]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("faults")
    model = make_tiny_model(folder / "tiny", num_attention_heads=6, num_key_value_heads=3)
    cache = {"max_tokens": 32_768, "tokens_per_block": 16}
    with System(folder / "system", model) as system:
        context = [
            system.start_worker(
                "context-a", role="context", tensor_parallel_size=2, kv_cache_config=cache, group=PATIENCE
            ),
            system.start_worker("context-b", role="context", kv_cache_config=cache),
        ]
        generation = [
            system.start_worker(f"generation-{name}", role="generation", kv_cache_config=cache) for name in "ab"
        ]
        edge = system.start_edge("edge", context, generation)
        system.wait_ready(*context, *generation, edge)
        yield Running(system, edge, context, generation)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.edge.http}/v1", api_key=running.system.key, max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


async def stream(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event | None = None) -> str:
    """The whole answer to question `number`; `begun` is set at its first text."""
    messages: Any = [
        {"role": "system", "content": "Be brief. " * 40},
        {"role": "user", "content": f"Question {number}"},
    ]
    text = ""
    async for chunk in await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
        if text and begun is not None:
            begun.set()
    return text


def ranks_of(worker: Part) -> list[psutil.Process]:
    return psutil.Process(worker.child.pid).children(recursive=True)


async def all_ready(running: Running, workers: int) -> None:
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient() as http:
        while True:
            answer = (await http.get(f"{running.edge.admin}/kinroute/v1/workers")).json()
            if sum(worker["ready"] for worker in answer["workers"]) == workers:
                return
            await asyncio.sleep(0.1)


async def test_a_context_rank_that_dies_costs_no_answer_and_its_group_comes_back(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    expected = await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))
    asked = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
    await asyncio.sleep(0.05)

    ranks_of(running.context[0])[-1].send_signal(signal.SIGKILL)

    assert await asyncio.gather(*asked) == expected
    running.system.wait_for(running.context[0], "ready", count=2)
    await all_ready(running, 4)
    assert await asyncio.gather(*(stream(client, number) for number in range(STREAMS))) == expected


async def test_a_rank_that_stops_in_the_middle_of_a_step_is_replaced_with_its_group(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    """Its peer waits in a collective; nothing hangs for longer than the launcher's patience."""
    assert len(ranks_of(running.context[0])) == 2
    os.kill(ranks_of(running.context[0])[-1].pid, signal.SIGSTOP)

    answers = await asyncio.gather(*(stream(client, number) for number in range(4)))

    assert all(answers)
    running.system.wait_for(running.context[0], "ready", count=3)
    await all_ready(running, 4)


async def test_streams_go_on_with_the_right_tokens_when_their_generation_worker_is_killed(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    """Last: this worker does not come back."""
    expected = await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))
    begun = asyncio.Event()
    asked = [asyncio.create_task(stream(client, number, begun)) for number in range(STREAMS)]
    await asyncio.wait_for(begun.wait(), WAIT_S)

    victim = psutil.Process(running.generation[0].child.pid)
    for process in [*victim.children(recursive=True), victim]:
        process.kill()

    assert await asyncio.gather(*asked) == expected
    await all_ready(running, 3)
