"""What a replay costs, by policy and role: CPU of one core and memory.

On the recorded sessions of `--trace`; without it on made-up families (`kinroute.replay.families`, `plain`).
"""

from __future__ import annotations

import itertools
import random
import resource
import time
from pathlib import Path
from typing import Any, Literal

from kinroute.replay.arm import Arm
from kinroute.replay.plays import PlayedRequest, replay
from kinroute.replay.readers import read_sessions
from kinroute.replay.simulation import simulate

REQUESTS = 20_000
CAPACITY_BLOCKS = 60_000
LANES = 48
GAP_S = 300.0
SEED = 1
ARMS: tuple[tuple[str, Literal["aggregated", "context"]], ...] = (
    ("lru", "aggregated"),
    ("subagent", "aggregated"),
    ("subagent", "context"),
    ("return_index", "aggregated"),
)
RECORDED_BYTES = 1024
"""`ru_maxrss` is in KiB."""


def run(trace: Path | None = None, requests: int = REQUESTS) -> dict[str, Any]:
    """Rows by arm; the memory is the process's peak up to there."""
    sessions = read_sessions([trace if trace is not None else Path("synthetic:plain")])
    plays = replay(sessions, alive=LANES, longest_gap_s=GAP_S, draws=random.Random(SEED))
    load = list(itertools.islice(plays, requests))
    return {
        "requests": requests,
        "capacity_blocks": CAPACITY_BLOCKS,
        "rows": [_row(load, Arm(policy, CAPACITY_BLOCKS, role=role)) for policy, role in ARMS],
    }


def _row(load: list[PlayedRequest], arm: Arm) -> dict[str, Any]:
    began_s = time.process_time()
    result = simulate(load, arm, lambda ended: None)
    cpu_s = time.process_time() - began_s
    return {
        "policy": arm.policy,
        "role": arm.role,
        "cpu_s": cpu_s,
        "requests_per_s": len(load) / cpu_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RECORDED_BYTES / 2**20,
        "block_hit_ratio": result.block_hit_ratio,
    }
