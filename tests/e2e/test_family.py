"""A whole system of real processes: two edges, two context workers, two generation workers, a tiny model."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.system import Part, System
from tests.tiny_models import make_tiny_model, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.anyio]

BLOCK = 16
WAIT_S = 60.0


@dataclass(frozen=True)
class Running:
    """The started system. `context` has TP 2 and 1, `generation` TP 1 and 2: every handoff changes the sharding."""

    system: System
    edges: list[Part]
    context: list[Part]
    generation: list[Part]
    openengine_edge: Part

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]]:
        """One for each edge."""
        async with AsyncExitStack() as stack:
            one, other = [
                await stack.enter_async_context(
                    openai.AsyncOpenAI(
                        base_url=f"{edge.http}/v1", api_key=self.system.key, max_retries=0, timeout=WAIT_S
                    )
                )
                for edge in self.edges
            ]
            yield one, other

    @property
    def workers(self) -> list[Part]:
        return self.context + self.generation


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("family")
    model = make_tiny_model(folder / "tiny", num_attention_heads=6, num_key_value_heads=3)
    cache = {"max_tokens": 32_768, "tokens_per_block": BLOCK}
    with System(folder / "system", model) as system:
        shapes = [("context", 2), ("context", 1), ("generation", 1), ("generation", 2)]
        workers = [
            system.start_worker(
                f"{role}-{ranks}",
                role=role,
                tensor_parallel_size=ranks,
                kv_cache_config=cache,
                scheduler={"max_num_tokens": 256},
            )
            for role, ranks in shapes
        ]
        context, generation = workers[:2], workers[2:]
        router = {"spill_depth": 1, "load_bound": 1.0}
        edges = [system.start_edge(f"edge-{n}", context, generation, router=router) for n in (1, 2)]
        openengine = system.start_edge("edge-openengine", context, generation, worker_protocol="openengine")
        system.wait_ready(*workers, *edges, openengine)
        yield Running(system, edges, context, generation, openengine)


@pytest.fixture
async def clients(running: Running) -> AsyncIterator[tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    async with running.clients() as both:
        yield both


Clients = tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]
Message = Any
"""A message as the client takes it; its own types are unions of one class per role."""


def tokens_in(text: str) -> int:
    return len(make_tokenizer().encode(text).ids)


def prompt(*texts: str) -> list[Message]:
    roles = ("system", "user", "assistant")
    return [{"role": roles[0] if n == 0 else roles[1 + (n - 1) % 2], "content": text} for n, text in enumerate(texts)]


async def ask(
    client: openai.AsyncOpenAI, messages: list[Message], headers: dict[str, str] | None = None, tokens: int = 4
) -> tuple[Any, dict[str, Any]]:
    """The completion and its route receipt."""
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        extra_headers=headers,
    )
    return raw.parse(), json.loads(raw.headers["X-Kinroute-Receipt"])


def own(conversation: str, parent: str | None = None) -> dict[str, str]:
    headers = {"X-Kinroute-Conversation-ID": conversation}
    return headers if parent is None else headers | {"X-Kinroute-Parent-ID": parent}


def held(part: Part) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{part.admin}/kinroute/v1/leaks", timeout=WAIT_S).json()
    return answer


async def test_a_parents_second_turn_finds_the_shared_blocks_and_its_child_lands_beside_it(clients: Clients) -> None:
    client = clients[0]
    system = "You are the parent of a small family of agents. " * 6
    first = prompt(system, "Plan the work.")
    one, parent_route = await ask(client, first, own("p1"))
    assert one.usage.prompt_tokens_details.cached_tokens == 0

    child, child_route = await ask(client, prompt(system, "Do the first half."), own("c1", "p1"))
    assert child_route["context_worker"] == parent_route["context_worker"]

    second = [*first, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "And now?"}]
    two, second_route = await ask(client, second, own("p1"))
    assert second_route["context_worker"] == parent_route["context_worker"]

    # What the first turn rendered is how the second begins; the child shares all up to its own question.
    begins = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    shared = tokens_in(f"{begins}Plan the work.<|im_end|>\n<|im_start|>assistant\n")
    assert two.usage.prompt_tokens_details.cached_tokens == shared // BLOCK * BLOCK
    assert child.usage.prompt_tokens_details.cached_tokens == tokens_in(begins) // BLOCK * BLOCK


async def test_both_edges_place_a_hundred_random_families_alike(clients: Clients) -> None:
    """Below every bound: a family's workers depend on the request alone."""
    rng = random.Random(11)
    favourites = set()
    for number in range(100):
        root = f"root-{rng.getrandbits(64):x}"
        match number % 3:
            case 0:
                headers: dict[str, str] = own(root)
            case 1:
                headers = own(f"{root}-child", root)
            case _:
                # Depth 3: the session that Claude Code sends at every depth is the root.
                headers = {
                    "x-claude-code-session-id": root,
                    "x-claude-code-agent-id": "grandchild",
                    "x-claude-code-parent-agent-id": "child",
                }
        messages = prompt("s", f"distinct prompt {number}")
        routes = [(await ask(client, messages, headers, tokens=2))[1] for client in clients]
        places = [(route["context_worker"], route["generation_worker"]) for route in routes]
        assert places[0] == places[1], headers
        parent_like = own(root)
        _, route = await ask(clients[number % 2], messages, parent_like, tokens=1)
        assert route["context_worker"] == places[0][0], "a child lands where its root is"
        favourites.add(places[0])
    assert len(favourites) == 4, "families spread over all pairs of workers"


async def test_above_the_bound_a_family_stays_within_its_first_spill_depth_workers(clients: Clients) -> None:
    """The depth is 1 here: however busy its favourites are, the family goes nowhere else, on either edge."""
    answers = await asyncio.gather(*(ask(clients[n % 2], prompt("s", "same"), own("busy")) for n in range(24)))
    assert len({(route["context_worker"], route["generation_worker"]) for _, route in answers}) == 1


async def test_an_edge_that_speaks_openengine_to_the_same_workers_gives_the_same_answers(
    running: Running, clients: Clients
) -> None:
    messages = prompt("A system prompt that fills some blocks. " * 4, "Which protocol is this?")
    expected, _ = await ask(clients[0], messages, tokens=24)
    async with openai.AsyncOpenAI(
        base_url=f"{running.openengine_edge.http}/v1", api_key=running.system.key, max_retries=0, timeout=WAIT_S
    ) as client:
        answer, route = await ask(client, messages, tokens=24)
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert route["context_worker"] != route["generation_worker"]


async def test_two_hundred_requests_with_random_cancels_leave_nothing_held(running: Running, clients: Clients) -> None:
    rng = random.Random(5)
    client = clients[0]
    slots = asyncio.Semaphore(32)

    async def one(number: int) -> str:
        async with slots:
            messages = prompt("shared system prompt " * rng.randrange(1, 12), f"question {number % 17}")
            stream = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=rng.randrange(1, 40),
                stream=True,
                temperature=1.0,
            )
            leave_after = rng.randrange(0, 12) if number % 3 == 0 else None
            seen = 0
            async for chunk in stream:
                if leave_after is not None and seen >= leave_after:
                    await stream.close()
                    return "left"
                seen += 1
                if chunk.choices and chunk.choices[0].finish_reason:
                    return "finished"
            return "ended"

    async def gone(number: int) -> str:
        """Hangs up while its prompt waits or prefills."""
        task = asyncio.create_task(one(number))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return "gone"

    outcomes = await asyncio.gather(*(gone(n) if n % 10 == 0 else one(n) for n in range(200)))
    assert outcomes.count("finished") > 100
    assert outcomes.count("left") > 20

    async with asyncio.timeout(WAIT_S):
        for edge in running.edges:
            while any(held(edge).values()):
                await asyncio.sleep(0.1)
        for worker in running.workers:
            while not held(worker)["clean"]:
                await asyncio.sleep(0.1)
