"""CPU per admitted request on recorded sessions, both managers fed with the same requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kv.laps import Laps, Part, Turn, spread_us, us
from bench.kv.turns import Manager, managers
from kinroute.replay.plays import replay
from kinroute.replay.readers import read_sessions
from kinroute.replay.traces import Session


@dataclass(frozen=True, slots=True)
class RecordedSize:
    """`warm_up` requests fill the cache, `requests` are measured. `num_pages`: of the device."""

    alive: int = 48
    longest_gap_s: float = 10.0
    num_pages: int = 131_072
    tokens_per_block: int = 32
    warm_up: int = 600
    requests: int = 1_500


def measure(trace: Path, size: RecordedSize) -> list[dict[str, Any]]:
    """A row per manager: the mean of each part, and the spread of the whole, in µs. `trace`: of any known format."""
    sessions = read_sessions([trace])
    rows = [
        {"manager": name, **_measured(manager, sessions, size)}
        for name, manager in managers(size.num_pages, size.tokens_per_block)
    ]
    for row in rows:
        row["ratio"] = round(row["mean"] / rows[0]["mean"], 2)
    return rows


def _measured(manager: Manager, sessions: Sequence[Session], size: RecordedSize) -> dict[str, Any]:
    requests = replay(sessions, alive=size.alive, longest_gap_s=size.longest_gap_s, draws=random.Random(1))
    laps: list[Laps] = []
    prompt_tokens = cached_tokens = 0
    for number, request in enumerate(itertools.islice(requests, size.warm_up + size.requests)):
        one = Laps()
        prompt = request.prompt
        turn = Turn(prompt, request.conversation, request.parent, request.answer)
        cached = manager.serve(turn, one)
        if number >= size.warm_up:
            laps.append(one)
            prompt_tokens += len(prompt)
            cached_tokens += cached
    return {
        "prompt_tokens": round(prompt_tokens / len(laps)),
        "cached": round(cached_tokens / prompt_tokens, 4),
        **{part.name.lower(): us(sum(one.ns[part] for one in laps) / len(laps)) for part in Part},
        **spread_us(laps),
    }
