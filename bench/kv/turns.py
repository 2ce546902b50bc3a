"""CPU per admitted request at long prompts: the turn after 43 others, of 142,000 tokens and 2,000 new ones.

`straight`: nothing but the conversation's own turns, so its path is one run. `forked`: behind each turn a sub-agent's
prompt of 20 blocks leaves the path, so it has as many runs as turns; each turn finds that the last one's sub-agent has
finished, and demotes it.

`near`: a conversation is built and then measured, so that its memory is in the processor's caches. `far`: many are
built side by side and then measured one after the other, so that hardly any of it is, as when others are served between
two turns; the new prompt itself has just come in.

The pool is full, and room is made for several requests at once: what evicting costs is the difference of means between
rounds of requests that take part in that and rounds for which there was room. Parts are of the latter, totals and
ratios of the former.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bench.block_manager import byte_keys, pickled_keys
from bench.kv.laps import Figures, Int32s, Laps, Part, Turn, medians_us, spread_us, us
from bench.kv.per_block import PerBlock
from bench.kv.run_tree import RunTree

VOCABULARY = 150_000
SHAPES = ("straight", "forked")
MEMORIES = ("near", "far")
RUN_TREE = "run tree"
PICKLED = "per block, keys as vLLM's"
BYTES = "per block, keys of bytes"
PARTS = ("match", "reserve", "commit", "release", "plan", "onboard", "collect", "evict")


@dataclass(frozen=True, slots=True)
class TurnsSize:
    """`far` conversations are built side by side and measured `far_rounds` times, or one `near_rounds` times; managers
    that make no room ahead a quarter as often. Some more rounds come first, until the pool is full."""

    warm_tokens: int = 142_000
    turns: int = 43
    new_tokens: int = 2_000
    tokens_per_block: int = 32
    side_tokens: int = 640
    far: int = 12
    far_rounds: int = 8
    near_rounds: int = 64

    def blocks(self, side_by_side: int) -> int:
        """Of all conversations that are alive at once, and as many as three more."""
        tokens = self.warm_tokens + self.new_tokens + self.turns * self.side_tokens
        return (side_by_side + 3) * tokens // self.tokens_per_block


class Manager(Protocol):
    def serve(self, turn: Turn, laps: Laps) -> int: ...

    def make_room(self, tokens: int) -> None: ...

    def pass_time(self) -> None: ...


def measure(size: TurnsSize) -> list[dict[str, Any]]:
    """A row per shape, nearness and manager, parts in µs; `ratio`: this manager's mean to the run tree's."""
    rows: list[dict[str, Any]] = []
    for shape, memory in itertools.product(SHAPES, MEMORIES):
        ours = 0.0
        side_by_side = 1 if memory == "near" else size.far
        for name, manager in managers(size.blocks(side_by_side), size.tokens_per_block):
            rounds = size.near_rounds if memory == "near" else size.far_rounds
            if name != RUN_TREE:
                rounds //= 4
            figures = _measured(manager, size, side_by_side, rounds, forked=shape == "forked")
            ours = ours or figures["mean"]
            ratio = round(figures["mean"] / ours, 2)
            rows.append({"shape": shape, "memory": memory, "manager": name, **figures, "ratio": ratio})
    return rows


def managers(num_pages: int, tokens_per_block: int) -> Iterator[tuple[str, Manager]]:
    """Each by its name, made when it is asked for. Host and disk have a quarter of the device's pages each, and those
    without tiers have as many pages as all three."""
    cold = num_pages // 4
    yield RUN_TREE, RunTree(num_pages, tokens_per_block, num_host_pages=cold, num_disk_pages=cold)
    yield PICKLED, PerBlock(num_pages + 2 * cold, tokens_per_block, pickled_keys)
    yield BYTES, PerBlock(num_pages + 2 * cold, tokens_per_block, byte_keys)


def _measured(manager: Manager, size: TurnsSize, side_by_side: int, rounds: int, *, forked: bool) -> Figures:
    full: list[Laps] = []
    roomy: list[Laps] = []
    # Host and disk, or what stands for them, are half as much as the device.
    until_full = -(-3 * (side_by_side + 3) // (2 * side_by_side))
    for number in range(until_full + rounds):
        for turn in _built(manager, size, number, side_by_side, forked=forked):
            has_room = number % 2 == 1
            if has_room:
                manager.make_room(2 * size.new_tokens)
            laps = Laps()
            cached = manager.serve(turn, laps)
            assert cached > size.warm_tokens - 2 * size.tokens_per_block, "the conversation was not warm"
            if number >= until_full:
                (roomy if has_room else full).append(laps)
    evict = statistics.fmean(map(_own_ns, full)) - statistics.fmean(map(_own_ns, roomy))
    return {**medians_us(roomy), "evict": us(evict), **spread_us(full)}


def _own_ns(laps: Laps) -> int:
    return laps.total_ns - laps.ns[Part.COLLECT]


def _built(manager: Manager, size: TurnsSize, number: int, side_by_side: int, *, forked: bool) -> list[Turn]:
    """Warm conversations' next turns."""
    draws = np.random.default_rng(number)
    turns: list[Turn] = []
    for index in range(side_by_side):
        name = f"{number}/{index}"
        warm = np.empty(0, np.int32)
        for turn in _turns(draws, size, name, forked=forked):
            manager.serve(turn, Laps())
            manager.pass_time()
            if turn.conversation == name:
                warm = turn.prompt
        turns.append(Turn(np.concatenate([warm, random_tokens(draws, size.new_tokens)]), name))
    return turns


def _turns(draws: np.random.Generator, size: TurnsSize, name: str, *, forked: bool) -> Iterator[Turn]:
    prompt = np.empty(0, np.int32)
    for number in range(size.turns):
        grown = size.warm_tokens * (number + 1) // size.turns - len(prompt)
        prompt = np.concatenate([prompt, random_tokens(draws, grown)])
        yield Turn(prompt, name)
        if forked:
            asked = np.concatenate([prompt, random_tokens(draws, size.side_tokens)])
            yield Turn(asked, f"{name}/{number}", name)


def random_tokens(draws: np.random.Generator, count: int) -> Int32s:
    return draws.integers(0, VOCABULARY, count, dtype=np.int32)
