"""Who gets how many of a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.sequences import Sequence


def share_out(budget: int, sequences: Iterable[Sequence]) -> list[int]:
    """Of `budget` tokens: those that decode have theirs first, then each what is left to compute, in their order."""
    left = [sequence.tokens_left for sequence in sequences]
    shares = [0] * len(left)
    for index in sorted(range(len(left)), key=lambda index: left[index] > 1):
        shares[index] = min(left[index], budget)
        budget -= shares[index]
    return shares
