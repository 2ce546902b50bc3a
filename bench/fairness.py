"""What a tenant's requests wait beside one that floods: p99 of the time to the first token, in simulated time.

Rank 0's own scheduler and cache manager, without a model: every step takes `STEP_MS`, whatever is in it, so the figures
depend on no machine. Eight well-behaved tenants are measured, each with requests at random times. Beside them there are
either eight more of their kind, or one tenant that floods, with the same load or with all that it can. A ratio is of
two runs with the same measured requests, and the median of five. `without_turns`: the wait if all were one tenant to
the worker. A second measurement goes through a real edge (`bench.fair_edge`).
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import fair_edge
from bench.http_load import percentile
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.outputs import Finished, TokenOut
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.types import Phase, Request, RequestKey, Sampled, Sampling, Stopping

SEEDS = (1, 2, 3, 4, 5)
STEP_MS = 10
TOKENS_A_STEP = 512
CAPACITY = TOKENS_A_STEP / STEP_MS
"""Prompt tokens a millisecond."""
PROMPTS = (250, 3250)
LONG_PROMPT = 60_000
ANSWER_TOKENS = 16
TENANTS = 8
LOAD = 0.4
"""Of the capacity: what the measured bring together, and what the others do beside them."""
DURATION_MS = 20_000
BURST_MS = 2_000
BLOCK = 32
QUEUE = 256
FLOODER = b"flooder"
BEGINS_MS = 1_000
"""When the flooder begins that is without bound: the others are there already."""
LONG_ANSWER = 512


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    at_ms: float
    tenant: bytes
    prompt_tokens: int
    answer_tokens: int = ANSWER_TOKENS


PILED = Arrival(BEGINS_MS, FLOODER, sum(PROMPTS) // 2)
PILED_ANSWERS = Arrival(BEGINS_MS, FLOODER, 20, LONG_ANSWER)

Others = Callable[[random.Random, int], list[Arrival]]
"""What comes beside the measured, until so many milliseconds."""


def run() -> dict[str, Any]:
    """In simulated time, and beside it, as `edge_...`, what is measured through an edge."""
    return simulated() | fair_edge.run()


def simulated(seeds: Sequence[int] = SEEDS, duration_ms: int = DURATION_MS) -> dict[str, Any]:
    """Rows by what the flooder does."""
    measured = {seed: list(_poisson(random.Random(seed), b"measured", duration_ms)) for seed in seeds}

    def p99_ms(others: Others, *, piled: Arrival | None = None, tagged: bool = True) -> list[float]:
        """By seed, of the measured beside others."""
        return [
            Simulation(measured[seed] + others(random.Random(1000 + seed), duration_ms), piled, tagged=tagged).p99_ms()
            for seed in seeds
        ]

    even = p99_ms(_alike)
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for name, others, piled in (
        ("the same load, in bursts", _bursts, None),
        (f"the same load, in prompts of {LONG_PROMPT} tokens", _long_prompts, None),
        ("as much as the queue takes, all the time", _nothing, PILED),
        (f"the same in tiny prompts, with answers of {LONG_ANSWER} tokens", _nothing, PILED_ANSWERS),
    ):
        beside = p99_ms(others, piled=piled)
        ratios = [one / other for one, other in zip(beside, even, strict=True)]
        worst = max(worst, statistics.median(ratios))
        rows.append(
            {
                "flooder": name,
                "ratio": statistics.median(ratios),
                "highest_ratio": max(ratios),
                "ttft_p99_ms": statistics.median(beside),
                # One that piles up fills the queue for all: they are refused.
                "without_turns": "refused" if piled else statistics.median(p99_ms(others, tagged=False)),
            }
        )
    return {
        "what": "fairness",
        "step_ms": STEP_MS,
        "tokens_a_step": TOKENS_A_STEP,
        "load_of_measured": LOAD,
        "even_ttft_p99_ms": statistics.median(even),
        "worst_ratio": worst,
        "rows": rows,
    }


def _poisson(dice: random.Random, name: bytes, until_ms: int) -> Iterator[Arrival]:
    """Of eight tenants, together with `LOAD`."""
    mean_ms = TENANTS * sum(PROMPTS) / 2 / (LOAD * CAPACITY)
    for number in range(TENANTS):
        at_ms = dice.expovariate(1 / mean_ms)
        while at_ms < until_ms:
            yield Arrival(at_ms, b"%s %d" % (name, number), dice.randrange(*PROMPTS))
            at_ms += dice.expovariate(1 / mean_ms)


def _alike(dice: random.Random, until_ms: int) -> list[Arrival]:
    return list(_poisson(dice, b"other", until_ms))


def _bursts(dice: random.Random, until_ms: int) -> list[Arrival]:
    """All at once what others send over `BURST_MS`."""
    arrivals = []
    for at_ms in range(0, until_ms, BURST_MS):
        tokens = LOAD * CAPACITY * BURST_MS
        while tokens > 0:
            arrivals.append(Arrival(at_ms, FLOODER, dice.randrange(*PROMPTS)))
            tokens -= arrivals[-1].prompt_tokens
    return arrivals


def _long_prompts(dice: random.Random, until_ms: int) -> list[Arrival]:
    every_ms = LONG_PROMPT / (LOAD * CAPACITY)
    return [Arrival(at * every_ms + dice.random(), FLOODER, LONG_PROMPT) for at in range(int(until_ms / every_ms))]


def _nothing(dice: random.Random, until_ms: int) -> list[Arrival]:
    return []


class Simulation:
    """One worker and what arrives. `piled`: from when on the flooder has as many of this waiting as the queue takes, at
    every moment."""

    def __init__(self, arrivals: list[Arrival], piled: Arrival | None, *, tagged: bool) -> None:
        self._arrivals = deque(sorted(arrivals))
        self._dice = np.random.default_rng(len(arrivals))
        self._piled = piled
        self._tagged = tagged
        replica = Replica(CacheConfig(num_pages=8192, tokens_per_block=BLOCK, enable_block_reuse=False))
        config = SchedulerConfig(max_num_tokens=TOKENS_A_STEP, max_queued_requests=QUEUE)
        self._scheduler = Scheduler(config, replica, lambda request: b"")
        self._keys = 0
        self._came_ms: dict[RequestKey, float] = {}
        self._waits_ms: list[float] = []
        self._due = sum(one.tenant.startswith(b"measured") for one in arrivals)

    def p99_ms(self) -> float:
        """Of the measured requests, once each had its first token."""
        now_ms = 0
        while len(self._waits_ms) < self._due:
            self._arrive(now_ms)
            made = self._scheduler.plan(now_ms)
            now_ms += STEP_MS
            if made is None:
                continue
            plan, work = made
            keys = work.batch.sample_requests if work.batch is not None else ()
            for output in self._scheduler.complete(plan, Sampled(keys, (0,) * len(keys))):
                if isinstance(output, TokenOut | Finished) and output.key in self._came_ms:
                    self._waits_ms.append(now_ms - self._came_ms.pop(output.key))
        return percentile(self._waits_ms, 0.99)

    def _arrive(self, now_ms: int) -> None:
        while self._arrivals and self._arrivals[0].at_ms <= now_ms:
            self._submit(self._arrivals.popleft())
        if self._piled is not None and now_ms >= self._piled.at_ms:
            while self._submit(self._piled):
                pass

    def _submit(self, arrival: Arrival) -> bool:
        self._keys += 1
        key = RequestKey(self._keys)
        request = Request(
            key=key,
            phase=Phase.AGGREGATED,
            token_ids=self._dice.integers(0, 1 << 20, arrival.prompt_tokens, np.int32),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(arrival.answer_tokens),
            tenant=arrival.tenant if self._tagged else b"",
        )
        is_taken = self._scheduler.submit(request) is None
        if arrival.tenant.startswith(b"measured"):
            assert is_taken, "a well-behaved tenant's request found no room"
            self._came_ms[key] = arrival.at_ms
        return is_taken
