"""Fairness by the clock: through a real edge, in front of a fake worker with fixed step times."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.parts import configured, embedded_model, process
from edge.keyring import ApiKey, KeyFile, Keyring

ROUNDS = 5
SECONDS = 8.0
STEP_MS = 10.0
TOKENS_A_STEP = 128
PROMPTS = (60, 800)
TENANTS = 8
LOAD = 0.4
"""Of what the worker computes: the measured tenants', and the others' beside them."""
CONNECTIONS = 64
MODEL = "bench"


def run(rounds: int = ROUNDS, seconds: float = SECONDS) -> dict[str, Any]:
    """One flooder with `CONNECTIONS` requests at a time, against as many more well-behaved tenants as are measured."""
    with tempfile.TemporaryDirectory() as folder, process(*_fake_worker()) as (worker, _):
        keyring = Keyring.create(Path(folder) / "keys.json")
        names = [f"measured {number}" for number in range(TENANTS)] + [f"other {number}" for number in range(TENANTS)]
        Keyring.change(keyring.path, lambda content: _with_tenants(content, [*names, "flooder"]))
        config = {
            "listen": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "model": {"name": MODEL, "path": str(embedded_model())},
            "keys_file": str(keyring.path),
            "context_servers": [worker["grpc"]],
            "generation_servers": [worker["grpc"]],
            "log": {"level": "warning"},
        }
        alike, flooding = Path(folder) / "alike.json", Path(folder) / "flooding.json"
        alike.write_text(json.dumps(names))
        flooding.write_text(json.dumps([*names[:TENANTS], "flooder"]))
        with configured("edge", config, until="ready") as (edge, _):
            pairs = [
                (
                    _p99_ms(edge["http"], alike, seed, seconds, flooders=0),
                    _p99_ms(edge["http"], flooding, seed, seconds, flooders=1),
                )
                for seed in range(rounds)
            ]
    return {
        "edge_ratio": statistics.median(beside / even for even, beside in pairs),
        "edge_highest_ratio": max(beside / even for even, beside in pairs),
        "edge_even_ttft_p99_ms": statistics.median(even for even, _ in pairs),
        "edge_ttft_p99_ms": statistics.median(beside for _, beside in pairs),
    }


def _fake_worker() -> tuple[str, ...]:
    return ("bench.fake_worker", "--step-ms", str(STEP_MS), "--tokens-per-step", str(TOKENS_A_STEP))


def _with_tenants(content: KeyFile, names: list[str]) -> KeyFile:
    """A tenant of each name, whose key is its name."""
    keys = tuple(ApiKey(f"k{at}", hashlib.sha256(name.encode()).hexdigest(), name) for at, name in enumerate(names))
    return msgspec.structs.replace(content, api_keys=keys)


def _p99_ms(address: str, keys: Path, seed: int, seconds: float, *, flooders: int) -> float:
    mean_s = TENANTS * sum(PROMPTS) / 2 / (LOAD * TOKENS_A_STEP / (STEP_MS / 1000))
    given = {
        "--address": address,
        "--model": MODEL,
        "--keys": keys,
        "--tenants": TENANTS,
        "--flooders": flooders,
        "--connections": CONNECTIONS,
        "--mean-s": mean_s,
        "--shortest": PROMPTS[0],
        "--longest": PROMPTS[1],
        "--seconds": seconds,
        "--seed": seed,
    }
    options = [text for name, value in given.items() for text in (name, str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "bench.tenant_load", *options], stdout=subprocess.PIPE, text=True, check=True
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["failures"] == 0, f"{seen['failures']} requests failed"
    return float(seen["ttft_p99_ms"])
