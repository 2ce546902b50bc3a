"""The embedded model itself, in float32: prefilled by two uneven ranks, decoded by one, as `transformers` would."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.openengine_client import Engine
from edge.tokenizing.model import TextModel
from tests.e2e.reference import Reference, assert_same_answer
from tests.e2e.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 24


def test_smollm2_answers_as_transformers_does_across_a_handoff(smollm2: Path, tmp_path: Path) -> None:
    """Nine query heads over three KV heads: 6 + 3 of them on the context worker's ranks."""
    messages = [
        {"role": "user", "content": "Name three animals that live in the sea, and say why they can breathe there."}
    ]
    packed = TextModel.load(smollm2).tokenize_chat(messages, scope=b"test")
    prompt = list(memoryview(packed).cast("I"))
    cache = {"max_tokens": 4096}
    with System(tmp_path, smollm2) as system:
        two = system.start_worker("context", role="context", tensor_parallel_size=2, kv_cache_config=cache)
        one = system.start_worker("generation", role="generation", kv_cache_config=cache)
        system.wait_ready(two, one)
        context, generation = Engine(two.grpc, "tiny"), Engine(one.grpc, "tiny")

        def ask(tokens: list[int], count: int) -> list[int]:
            return generation.decode(tokens, count, context.prefill(tokens, count))

        assert_same_answer(Reference(smollm2), prompt, ask(prompt, TOKENS), ask)
