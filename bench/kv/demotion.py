"""What demoting a conversation costs, against its blocks and its runs, and what it costs when others take its pages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.kv.laps import us
from bench.kv.run_tree import RunTree
from bench.kv.trees import own


@dataclass(frozen=True, slots=True)
class DemotionSize:
    """`of_blocks` with `runs` runs each, `of_runs` with `blocks` blocks each, `falling` pages each; `times` each."""

    of_blocks: Sequence[int] = (90, 900, 9_000, 90_000)
    runs: int = 9
    of_runs: Sequence[int] = (1, 3, 9, 33, 129)
    blocks: int = 9_000
    falling: Sequence[int] = (64, 512, 4_096, 32_768)
    tokens_per_block: int = 32
    times: int = 15


def measure(size: DemotionSize) -> dict[str, Any]:
    return {
        "by_blocks": [_demoted(size, size.runs, blocks) for blocks in size.of_blocks],
        "by_runs": [_demoted(size, runs, size.blocks) for runs in size.of_runs],
        "falling": [_fallen(size, pages) for pages in size.falling],
    }


def _demoted(size: DemotionSize, runs: int, blocks: int) -> dict[str, Any]:
    """One conversation is demoted and restored again and again."""
    tree = RunTree(2 * blocks + 1024, size.tokens_per_block, num_host_pages=64)
    own(tree, tree.block, "a", runs=runs, blocks=blocks, draws=np.random.default_rng(0))
    costs: list[int] = []
    lowered = 0
    for _ in range(size.times):
        before = time.thread_time_ns()
        lowered = tree.demote("a")
        costs.append(time.thread_time_ns() - before)
        tree.restore("a")
        tree.rest()
    cost = us(statistics.median(costs))
    return {"runs": tree.num_runs, "blocks": lowered, "us": cost, "us_per_run": round(cost / tree.num_runs, 2)}


def _fallen(size: DemotionSize, pages: int) -> dict[str, Any]:
    """A demoted conversation lies in front of an equal one that was used before it, and stays."""
    draws = np.random.default_rng(0)
    tree = RunTree(2 * pages + 1024, size.tokens_per_block, num_host_pages=64)
    survivor = own(tree, tree.block, "older", runs=1, blocks=pages, draws=draws)
    costs: list[int] = []
    for number in range(size.times):
        prompt = own(tree, tree.block, f"{number}", runs=1, blocks=pages, draws=draws)
        tree.demote(f"{number}")
        wanted = tree.num_free + pages
        before = time.thread_time_ns()
        tree.take(wanted)
        costs.append(time.thread_time_ns() - before)
        assert not tree.match(prompt).blocks, "a demoted block outlasted others"
        assert tree.match(survivor).blocks == pages, "a block fell that was worth more"
        tree.rest()
    cost = us(statistics.median(costs))
    return {"pages": pages, "us": cost, "ns_per_page": round(1000 * cost / pages, 1)}
