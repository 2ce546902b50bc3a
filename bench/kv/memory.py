"""Bytes per tracked block, each measured in a process of its own, which grows a synthetic tree and says what it holds.

`traced`: what Python and numpy asked for (tracemalloc). `resident`: by how much the process grew, what the allocators
waste and round up included.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from bench.block_manager import byte_keys
from bench.kv.per_block import PerBlock
from bench.kv.run_tree import RunTree
from bench.kv.trees import grow

MANAGERS = ("run tree", "per block")


@dataclass(frozen=True, slots=True)
class MemorySize:
    blocks: int = 1_000_000
    tokens_per_block: int = 32


def measure(size: MemorySize) -> list[dict[str, Any]]:
    """A row for each manager; the pages' own bookkeeping is included, the KV bytes are not."""
    rows: list[dict[str, Any]] = []
    for manager in MANAGERS:
        resident, traced = (_in_process(manager, size, how) for how in ("resident", "traced"))
        blocks = resident["blocks"]
        rows.append(
            {
                "manager": manager,
                "blocks": blocks,
                "runs": resident["runs"],
                "traced_bytes": round(traced["bytes"] / blocks, 1),
                "resident_bytes": round(resident["bytes"] / blocks, 1),
            }
        )
    return rows


def _in_process(manager: str, size: MemorySize, how: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.kv.memory", manager, str(size.blocks), str(size.tokens_per_block), how]
    said: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return said


def _bytes(how: str) -> int:
    gc.collect()
    if how == "traced":
        return tracemalloc.get_traced_memory()[0]
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("manager", choices=MANAGERS)
    parser.add_argument("blocks", type=int)
    parser.add_argument("tokens_per_block", type=int)
    parser.add_argument("how", choices=["resident", "traced"])
    given = parser.parse_args()
    draws = np.random.default_rng(0)
    # Whatever is made once is made before anything is counted.
    grow(RunTree(256, 2), 2, 128, draws)
    if given.how == "traced":
        tracemalloc.start()
    before = _bytes(given.how)
    num_pages = given.blocks * 21 // 20 + 4096
    manager = (
        RunTree(num_pages, given.tokens_per_block)
        if given.manager == "run tree"
        else PerBlock(num_pages, given.tokens_per_block, byte_keys)
    )
    grow(manager, given.tokens_per_block, given.blocks, draws)
    held = _bytes(given.how) - before
    runs = manager.num_runs if isinstance(manager, RunTree) else manager.num_blocks
    print(json.dumps({"blocks": manager.num_blocks, "runs": runs, "bytes": held}))


if __name__ == "__main__":
    main()
