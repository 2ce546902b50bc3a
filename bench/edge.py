"""What the edge costs: CPU for a request and for a streamed token, and the time to the first token that it adds.

A real edge in front of a fake worker (steps of 10 ms) under 1, 16 and 128 clients that stream 64 tokens, against the
same load sent straight to a fake worker over EngineLink, in turns in the same run. The CPU is the edge process's own;
answers of 1 and of 64 tokens separate the request from the token. Clients begin evenly over the time of one answer, but
for `herd_added_ttft_p99_ms`, where they begin all at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from bench.parts import configured, cpu_s, embedded_model, process
from edge.keyring import Keyring

CLIENTS = (1, 16, 128)
TOKENS = 64
STEP_MS = 10.0
SPREAD_MS = TOKENS * STEP_MS
MODEL = "bench"
REQUESTS = {1: 30, 16: 10, 128: 6}
SHORT_REQUESTS = {1: 200, 16: 60, 128: 20}


def run() -> dict[str, Any]:
    """Rows by number of clients."""
    model = embedded_model()
    with (
        tempfile.TemporaryDirectory() as folder,
        process("bench.fake_worker") as (worker, _),
        process("bench.fake_worker") as (straight, _),
    ):
        keyring = Keyring.open(Path(folder) / "keys.json")
        # One worker for both phases: the same legs as the load that goes straight.
        config = {
            "listen": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "model": {"name": MODEL, "path": str(model)},
            "keys_file": str(keyring.path),
            "context_servers": [worker["grpc"]],
            "generation_servers": [worker["grpc"]],
            "log": {"level": "warning"},
        }
        with configured("edge", config, until="ready") as (edge, edge_process):
            through = Through(edge["http"], keyring.local_key, edge_process)
            through.load(16, 5, TOKENS)
            rows = [_row(clients, through, straight["grpc"]) for clients in CLIENTS]
    return {"what": "edge", "step_ms": STEP_MS, "tokens": TOKENS, "rows": rows}


class Through:
    """The load through one edge, and the CPU that it cost the edge."""

    def __init__(self, address: str, key: str, edge: psutil.Process) -> None:
        self._where = ("--address", address, "--key", key, "--model", MODEL)
        self._edge = edge

    def load(
        self, clients: int, requests: int, tokens: int, spread_ms: float = SPREAD_MS
    ) -> tuple[dict[str, Any], float]:
        """What the clients saw, and the edge's CPU microseconds a request."""
        before_s = cpu_s(self._edge)
        seen = _load("bench.http_load", clients, requests, tokens, spread_ms, *self._where)
        assert seen["failures"] == 0, f"{seen['failures']} requests failed"
        return seen, 1e6 * (cpu_s(self._edge) - before_s) / (clients * requests)


def _row(clients: int, through: Through, straight: str) -> dict[str, Any]:
    requests = REQUESTS[clients]
    _, short_us = through.load(clients, SHORT_REQUESTS[clients], 1)
    seen, long_us = through.load(clients, requests, TOKENS)
    direct = _load("bench.link_load", clients, requests, TOKENS, SPREAD_MS, "--address", straight)
    herd, _ = through.load(clients, requests, TOKENS, spread_ms=0.0)
    direct_herd = _load("bench.link_load", clients, requests, TOKENS, 0.0, "--address", straight)
    return {
        "clients": clients,
        "request_cpu_us": short_us,
        "token_cpu_us": (long_us - short_us) / (TOKENS - 1),
        "straight_ttft_p50_ms": direct["ttft_p50_ms"],
        "added_ttft_p50_ms": seen["ttft_p50_ms"] - direct["ttft_p50_ms"],
        "added_ttft_p99_ms": seen["ttft_p99_ms"] - direct["ttft_p99_ms"],
        "herd_added_ttft_p99_ms": herd["ttft_p99_ms"] - direct_herd["ttft_p99_ms"],
        "gap_p99_ms": seen["gap_p99_ms"],
        "straight_gap_p99_ms": direct["gap_p99_ms"],
    }


def _load(module: str, clients: int, requests: int, tokens: int, spread_ms: float, *arguments: str) -> dict[str, Any]:
    numbers = {"--clients": clients, "--requests": requests, "--tokens": tokens, "--spread-ms": spread_ms}
    options = [text for name, value in numbers.items() for text in (name, str(value))]
    done = subprocess.run(
        [sys.executable, "-m", module, *options, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen
