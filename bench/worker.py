"""A worker against `transformers` with as many threads, and against itself: batch 1 and 8, TP 1 and 2.

All processes run from the beginning to the end, idle but for whose turn it is; each round measures every one of them,
and the medians over the rounds are compared. Times are a client's, over OpenEngine.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.openengine_client import Engine
from bench.parts import configured, embedded_model

MODEL = "bench"
DTYPE = "bfloat16"
THREADS = 1
ROUNDS = 5
DECODE_TOKENS = 48
PROMPT_TOKENS = 64
PREFILL_TOKENS = 512
BATCH = 8


def run(folder: Path | None = None) -> dict[str, Any]:
    """Medians, and the ratios that matter. `folder`: a model folder; None: the embedded model."""
    folder = folder or embedded_model()
    rng = random.Random(3)
    with ExitStack() as stack:
        ask = stack.enter_context(_reference(folder))
        engines = {ranks: Engine(stack.enter_context(_worker(folder, ranks)), MODEL) for ranks in (1, 2)}
        measured: dict[str, list[float]] = defaultdict(list)
        for turn in range(ROUNDS + 1):
            took = _round(rng, ask, engines)
            # The first round warms caches and allocators.
            for name, value in took.items() if turn else ():
                measured[name].append(value)
    medians = {name: statistics.median(values) for name, values in measured.items()}
    decode, batch = medians["tp1_decode_tokens_per_s"], medians["tp1_batch8_tokens_per_s"]
    return {
        "what": "worker",
        "dtype": DTYPE,
        "threads_per_rank": THREADS,
        **medians,
        "decode_vs_transformers": decode / medians["transformers_decode_tokens_per_s"],
        "batch8_vs_batch1": batch / decode,
        "prefill_time_vs_transformers": medians["tp1_prefill_ms"] / medians["transformers_prefill_ms"],
        "tp2_decode_vs_tp1": medians["tp2_decode_tokens_per_s"] / decode,
        "tp2_prefill_time_vs_tp1": medians["tp2_prefill_ms"] / medians["tp1_prefill_ms"],
    }


def _round(rng: random.Random, ask: Any, engines: dict[int, Engine]) -> dict[str, float]:
    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(tokens)]

    took_s = ask({"what": "decode", "prompt": prompt(PROMPT_TOKENS), "tokens": DECODE_TOKENS})
    values = {
        "transformers_decode_tokens_per_s": DECODE_TOKENS / took_s,
        "transformers_prefill_ms": 1000 * ask({"what": "prefill", "prompt": prompt(PREFILL_TOKENS)}),
    }
    for ranks, engine in engines.items():
        one = engine.timed_answer(prompt(PROMPT_TOKENS), DECODE_TOKENS + 1)
        values[f"tp{ranks}_decode_tokens_per_s"] = one.decode_tokens_per_s
        values[f"tp{ranks}_prefill_ms"] = 1000 * engine.timed_answer(prompt(PREFILL_TOKENS), 1).ttft_s
    with ThreadPoolExecutor(BATCH) as pool:
        prompts = [prompt(PROMPT_TOKENS) for _ in range(BATCH)]
        answers = list(pool.map(lambda one: engines[1].timed_answer(one, DECODE_TOKENS + 1), prompts))
    values["tp1_batch8_tokens_per_s"] = sum(answer.decode_tokens_per_s for answer in answers)
    return values


@contextmanager
def _worker(folder: Path, ranks: int) -> Iterator[str]:
    config = {
        "model": str(folder),
        "served_model_name": MODEL,
        "role": "aggregated",
        "tensor_parallel_size": ranks,
        "device": "cpu",
        "dtype": DTYPE,
        "threads_per_rank": THREADS,
        "listen": {"grpc": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "kv_cache_config": {"max_tokens": 16_384},
    }
    with configured("worker", config, until="ready") as (said, _):
        yield said["grpc"]


@contextmanager
def _reference(folder: Path) -> Iterator[Any]:
    command = [sys.executable, "-m", "bench.transformers_reference", str(folder), DTYPE, str(THREADS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout
        answers.readline()

        def ask(what: dict[str, Any]) -> float:
            requests.write(json.dumps(what) + "\n")
            requests.flush()
            return float(json.loads(answers.readline())["s"])

        try:
            yield ask
        finally:
            requests.close()
