"""Draws one token per row of logits, each row by its own rules and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLDEST = 1e-5
"""Below this temperature a draw is greedy: dividing by less would leave float32."""
LIKELIEST = 1024
"""How many candidates are ranked at first: mostly enough for top-p, and much cheaper than to sort a vocabulary."""
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Rule:
    """Applied in this order, as transformers does. `point` in [0, 1) is the row's random number."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    point: float

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def ranked(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


def uniform(seed: int, index: int) -> float:
    """The `index`th number in [0, 1) of the sequence that `seed` names (splitmix64)."""
    state = (_mix(seed & _MASK) + (index + 1) * _GOLDEN) & _MASK
    return (_mix(state) >> 11) * 2.0**-53


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def draw(logits: Tensor, rules: Sequence[Rule]) -> list[int]:
    """logits: float32 [R, V]. A row's token does not depend on the other rows."""
    chosen: list[int] = logits.argmax(-1).tolist() if any(rule.greedy for rule in rules) else [0] * len(rules)
    for pick, ranked in ((_draw_ranked, True), (_draw_plain, False)):
        rows = [row for row, rule in enumerate(rules) if not rule.greedy and rule.ranked == ranked]
        if rows:
            mine = [rules[row] for row in rows]
            scaled = logits[rows] / _column(logits, [rule.temperature for rule in mine])
            for row, token in zip(rows, pick(scaled, mine), strict=True):
                chosen[row] = token
    return chosen


def _draw_plain(scaled: Tensor, rules: Sequence[Rule]) -> list[int]:
    return _pick(_likely(torch.softmax(scaled, -1), rules), rules)


def _draw_ranked(scaled: Tensor, rules: Sequence[Rule]) -> list[int]:
    size = scaled.shape[1]
    kept = [min(rule.top_k, size) if rule.top_k > 0 else size for rule in rules]
    width = min(size, max([LIKELIEST, *(rule.top_k for rule in rules)]))
    weights, ids = _candidates(scaled, kept, width)
    top_p = _column(scaled, [rule.top_p for rule in rules])
    missing = (weights.sum(-1, keepdim=True) < top_p) & (_column(scaled, kept) > width)
    if bool(missing.any()):
        weights, ids = _candidates(scaled, kept, size)
    # The token that reaches top_p stays, and so the likeliest always does.
    weights = torch.where(weights.cumsum(-1) - weights < top_p, weights, 0.0)
    places = _pick(_likely(weights, rules), rules)
    return [int(ids[row, place]) for row, place in enumerate(places)]


def _candidates(scaled: Tensor, kept: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """The likeliest `width` tokens of each row, best first: probabilities after top-k, and ids, both [R, width]."""
    values, ids = scaled.topk(width)
    rank = torch.arange(width, device=scaled.device)
    values = values.masked_fill(rank >= _column(scaled, kept), -torch.inf)
    everything = torch.logsumexp(scaled, -1, keepdim=True)
    best = torch.logsumexp(values, -1, keepdim=True)
    whole = _column(scaled, kept) == scaled.shape[1]
    return torch.exp(values - torch.where(whole, everything, best)), ids


def _likely(weights: Tensor, rules: Sequence[Rule]) -> Tensor:
    """Without what min-p excludes."""
    if not any(rule.min_p > 0.0 for rule in rules):
        return weights
    least = weights.amax(-1, keepdim=True) * _column(weights, [rule.min_p for rule in rules])
    return torch.where(weights >= least, weights, 0.0)


def _pick(weights: Tensor, rules: Sequence[Rule]) -> list[int]:
    """Each row's column at its point of the cumulated weights [R, N], which need not sum to one."""
    ladder = weights.double().cumsum(-1)
    points = _column(ladder, [rule.point for rule in rules]) * ladder[:, -1:]
    places = torch.searchsorted(ladder, points, right=True)[:, 0].tolist()
    return [min(place, weights.shape[1] - 1) for place in places]


def _column(like: Tensor, numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]
