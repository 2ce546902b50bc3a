"""Synthetic conversations of given shape, made by serving requests."""

from __future__ import annotations

import math

import numpy as np

from bench.kv.laps import Int32s, Laps, Turn
from bench.kv.turns import Manager, random_tokens

QUANTILES = ((0.0, 1.0), (0.1, 4.0), (0.5, 20.0), (0.9, 200.0), (1.0, 1250.0))
"""Lengths of recorded runs: a tenth at most four blocks, median 20, mean 93. Between them the logarithm is linear."""
MEAN_RUN = 93
TURNS = 20


def run_lengths(count: int, draws: np.random.Generator) -> list[int]:
    """`count` lengths in blocks, spread evenly over the distribution, in random order."""
    at = (np.arange(count) + 0.5) / count
    shares, lengths = zip(*QUANTILES, strict=True)
    logs = np.interp(at, shares, [math.log(length) for length in lengths])
    return [math.ceil(length) for length in draws.permutation(np.exp(logs)).tolist()]


def grow(manager: Manager, block: int, blocks: int, draws: np.random.Generator) -> None:
    """Add about so many blocks: conversations of 20 turns, each with a sub-agent's prompt behind every turn."""
    lengths = run_lengths(max(2, blocks // MEAN_RUN), draws)
    name = str(draws.integers(1 << 62))
    prompt = np.empty(0, np.int32)
    for number, (grown, side) in enumerate(zip(lengths[::2], lengths[1::2], strict=False)):
        if number % TURNS == 0:
            prompt = np.empty(0, np.int32)
        conversation = f"{name}/{number // TURNS}"
        prompt = _extended(prompt, grown * block, draws)
        manager.serve(Turn(prompt, conversation), Laps())
        asked = _extended(prompt, side * block, draws)
        manager.serve(Turn(asked, f"{conversation}/{number}", conversation), Laps())


def own(manager: Manager, block: int, name: str, *, runs: int, blocks: int, draws: np.random.Generator) -> Int32s:
    """A conversation that owns about so many blocks in so many runs, an odd number: every turn but the last was edited.

    Returns its last prompt.
    """
    each = max(1, blocks // runs) * block
    prompt = np.empty(0, np.int32)
    for number in range((runs + 1) // 2):
        prompt = _extended(prompt, each, draws)
        manager.serve(Turn(prompt, name), Laps())
        if number < runs // 2:
            manager.serve(Turn(_extended(prompt, each, draws), name), Laps())
    return prompt


def _extended(prompt: Int32s, tokens: int, draws: np.random.Generator) -> Int32s:
    return np.concatenate([prompt, random_tokens(draws, tokens)])
