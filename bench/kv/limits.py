"""What no manager of this kind can go below here: to compare a prompt once, and to make the keys of its new blocks."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.kv.laps import Figures, us
from bench.kv.turns import random_tokens
from enginelink.block_keys import BlockScope, block_keys, scope_key


@dataclass(frozen=True, slots=True)
class LimitsSize:
    """`pairs` of prompts are compared in turn, so that they come from memory."""

    warm_tokens: int = 142_000
    new_tokens: int = 2_016
    tokens_per_block: int = 32
    pairs: int = 24
    times: int = 300


def measure(size: LimitsSize) -> dict[str, Any]:
    """Medians in µs."""
    draws = np.random.default_rng(0)
    tokens = random_tokens(draws, size.warm_tokens)
    pairs = [(tokens.copy(), tokens.copy()) for _ in range(size.pairs)]
    in_turn = itertools.cycle(pairs)
    as_bytes = itertools.cycle([(one.tobytes(), other) for one, other in pairs])
    new = random_tokens(draws, size.new_tokens).tobytes()
    scope = scope_key(BlockScope(b"a tenant's salt"))

    def compare(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> object:
        return (one != other).argmax()

    figures: Figures = {
        "compare_near_us": _median(size, lambda: compare(*pairs[0])),
        "compare_far_us": _median(size, lambda: compare(*next(in_turn))),
        "compare_bytes_far_us": _median(size, lambda: _starts(*next(as_bytes))),
        "new_keys_us": _median(size, lambda: block_keys(scope, new, size.tokens_per_block)),
    }
    return {"tokens": size.warm_tokens, "new_keys": size.new_tokens // size.tokens_per_block, **figures}


def _starts(prompt: bytes, run: Any) -> bool:
    return prompt.startswith(run)


def _median(size: LimitsSize, work: Callable[[], object]) -> float:
    costs: list[int] = []
    for _ in range(size.times):
        before = time.thread_time_ns()
        work()
        costs.append(time.thread_time_ns() - before)
    return us(statistics.median(costs))
