"""What a step costs against the number of idle blocks: one request decodes, or nothing happens at all."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.kv.laps import us
from bench.kv.run_tree import RunTree
from bench.kv.trees import grow
from bench.kv.turns import random_tokens


@dataclass(frozen=True, slots=True)
class IdleSize:
    idle_blocks: Sequence[int] = (1_000, 10_000, 100_000, 1_000_000)
    tokens_per_block: int = 32
    steps: int = 300


def measure(size: IdleSize) -> list[dict[str, Any]]:
    """A row for each number of blocks, medians in µs; the tree grows from one to the next."""
    draws = np.random.default_rng(0)
    tree = RunTree(size.idle_blocks[-1] * 5 // 4 + 4096, size.tokens_per_block, num_host_pages=64)
    rows: list[dict[str, Any]] = []
    for blocks in size.idle_blocks:
        grow(tree, tree.block, blocks - tree.num_blocks, draws)
        key = tree.begin_decoding(random_tokens(draws, 4 * tree.block))
        rows.append(
            {
                "idle_blocks": tree.num_blocks - 4,
                "runs": tree.num_runs,
                "decode_us": _median(size, functools.partial(tree.decode, key)),
                "empty_us": _median(size, tree.rest),
            }
        )
        tree.end(key)
    return rows


def _median(size: IdleSize, step: Callable[[], object]) -> float:
    costs: list[int] = []
    for _ in range(size.steps):
        before = time.thread_time_ns()
        step()
        costs.append(time.thread_time_ns() - before)
    return us(statistics.median(costs))
