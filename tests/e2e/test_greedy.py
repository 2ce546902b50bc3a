"""Greedy answers equal those of `transformers`, token for token, however a request is served.

Per architecture four workers run: `even1` and `even2` (TP 1 and 2 of a model with 2 KV heads), `uneven1` and `uneven2`
(of one with 3). Each serves every pair of values of: aggregated or handed over to its sibling; the prompt fresh or
cached; prefilled whole or in chunks; alone or among eight.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from bench.openengine_client import Engine
from tests.e2e.reference import Reference, assert_same_answer
from tests.e2e.system import System
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHUNK = 64
ANSWER_TOKENS = 12
SHAPES = {
    "even": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "uneven": {"num_attention_heads": 6, "num_key_value_heads": 3},
}
SIBLING = {"even1": "even2", "even2": "even1", "uneven1": "uneven2", "uneven2": "uneven1"}


@dataclass(frozen=True)
class Case:
    handed_over: bool
    cached: bool
    chunked: bool
    batched: bool


# Every pair of values stands in some row.
CASES = [
    Case(handed_over=False, cached=False, chunked=False, batched=False),
    Case(handed_over=False, cached=True, chunked=True, batched=True),
    Case(handed_over=True, cached=False, chunked=True, batched=True),
    Case(handed_over=True, cached=True, chunked=False, batched=True),
    Case(handed_over=True, cached=True, chunked=True, batched=False),
]


@dataclass(frozen=True)
class Workers:
    engines: dict[str, Engine]
    references: dict[str, Reference]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp(request.param)
    models = {name: make_tiny_model(folder / name, request.param, **shape) for name, shape in SHAPES.items()}
    parts = {}
    with (
        System(folder / "even-system", models["even"]) as even,
        System(folder / "uneven-system", models["uneven"]) as uneven,
    ):
        for shape, system in (("even", even), ("uneven", uneven)):
            for ranks in (1, 2):
                name = f"{shape}{ranks}"
                parts[name] = system.start_worker(
                    name,
                    role="aggregated",
                    tensor_parallel_size=ranks,
                    scheduler={"max_num_tokens": CHUNK, "max_batch_size": 8},
                    kv_cache_config={"max_tokens": 8192, "tokens_per_block": 16},
                )
        for name, part in parts.items():
            (even if name.startswith("even") else uneven).wait_ready(part)
        yield Workers(
            engines={name: Engine(part.grpc, "tiny") for name, part in parts.items()},
            references={name: Reference(folder) for name, folder in models.items()},
        )


def prompts_of(case: Case, seed: str) -> list[list[int]]:
    """Eight or one; longer than a step's budget where the prefill must be chunked; lengths mixed."""
    rng = random.Random(seed)
    lengths = (150, 97, 200, 130, 81, 333, 65, 100) if case.chunked else (40, 33, 7, 16, 17, 1, 60, 32)
    return [[rng.randrange(10, 200) for _ in range(length)] for length in lengths[: 8 if case.batched else 1]]


@pytest.mark.parametrize("worker", ["even1", "even2", "uneven1", "uneven2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_answers_equal_those_of_transformers(workers: Workers, worker: str, case: Case) -> None:
    engine, sibling = workers.engines[worker], workers.engines[SIBLING[worker]]
    reference = workers.references[worker.rstrip("12")]
    prompts = prompts_of(case, f"{worker} {case}")

    def ask(prompt: list[int], tokens: int) -> list[int]:
        if case.handed_over:
            return sibling.decode(prompt, tokens, engine.prefill(prompt, tokens))
        return engine.answer(prompt, tokens)

    def ask_once(prompt: list[int]) -> list[int]:
        return ask(prompt, ANSWER_TOKENS)

    with ThreadPoolExecutor(len(prompts)) as pool:
        if case.cached:
            list(pool.map(ask_once, prompts))
        answers = list(pool.map(ask_once, prompts))

    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == ANSWER_TOKENS
        assert_same_answer(reference, prompt, answer, ask)
