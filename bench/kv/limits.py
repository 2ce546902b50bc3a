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
    """`copies` of the prompt, together more than the caches hold, are each compared with it in turn."""

    warm_tokens: int = 142_000
    new_tokens: int = 2_016
    tokens_per_block: int = 32
    copies: int = 128
    times: int = 300


def measure(size: LimitsSize) -> dict[str, Any]:
    """Medians in µs. `near`: the same two arrays again and again; `far`: one of the two comes from memory."""
    draws = np.random.default_rng(0)
    prompt = random_tokens(draws, size.warm_tokens)
    copies = [prompt.copy() for _ in range(size.copies)]
    in_turn = itertools.cycle(copies)
    new = random_tokens(draws, size.new_tokens).tobytes()
    scope = scope_key(BlockScope(b"a tenant's salt"))
    figures: Figures = {
        "compare_near_us": _median(size, lambda: (prompt != copies[0]).argmax()),
        "compare_far_us": _median(size, lambda: (prompt != next(in_turn)).argmax()),
        "new_keys_us": _median(size, lambda: block_keys(scope, new, size.tokens_per_block)),
    }
    return {"tokens": size.warm_tokens, "new_keys": size.new_tokens // size.tokens_per_block, **figures}


def _median(size: LimitsSize, work: Callable[[], object]) -> float:
    costs: list[int] = []
    for _ in range(size.times):
        before = time.thread_time_ns()
        work()
        costs.append(time.thread_time_ns() - before)
    return us(statistics.median(costs))
