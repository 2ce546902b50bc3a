"""Chooses the next tokens on rank 0 alone, so that ranks cannot differ.

Order, as Hugging Face and vLLM have it: penalties, end tokens barred below `min_tokens`, temperature, top-k, top-p,
min-p, then one draw per request. Reported log probabilities are those of the model itself, before all of these.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.core.types import Logprobs, Request, RequestKey, Sampled, Sampling

GOLDEN = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class _State:
    """`prompt_seen`, `counts`: [V] of this request, made where penalties need them."""

    sampling: Sampling
    min_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    produced: int
    prompt_seen: Tensor | None
    counts: Tensor | None


class Sampler:
    """State of each live request, from `add` to `remove`; `sample` records what it chose.

    A request's draws depend on its seed and on how many tokens it has, never on what shares its batch.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[RequestKey, _State] = {}
        self._entropy = random.SystemRandom()

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request: Request) -> None:
        sampling = request.sampling
        penalised = sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty
        output = [int(token) for token in request.token_ids[len(request.token_ids) - request.resumed_tokens :]]
        if request.first_token is not None:
            output.append(request.first_token)
        seen = counts = None
        if penalised:
            prompt = torch.from_numpy(request.token_ids[: len(request.token_ids) - request.resumed_tokens]).long()
            seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            seen[prompt.to(self._device)] = True
            counts = torch.zeros(self._vocab_size, device=self._device)
            for token in output:
                counts[token] += 1
        seed = self._entropy.getrandbits(63) if sampling.seed is None else sampling.seed
        self._states[request.key] = _State(
            sampling, request.stopping.min_tokens, request.stopping.stop_token_ids, seed, len(output), seen, counts
        )

    def remove(self, key: RequestKey) -> None:
        self._states.pop(key, None)

    @torch.inference_mode()
    def sample(self, requests: tuple[RequestKey, ...], logits: Tensor) -> Sampled:
        """`logits`: float32 [R, V], row i of `requests[i]`; they are changed. One token a request."""
        states = [self._states[key] for key in requests]
        wanted = {row: state.sampling.logprobs for row, state in enumerate(states) if state.sampling.logprobs >= 0}
        raw = {row: torch.log_softmax(logits[row], -1) for row in wanted}
        for row, state in enumerate(states):
            self._shape(logits[row], state)
        if all(state.sampling.temperature == 0.0 for state in states):
            chosen = logits.argmax(-1).tolist()
        else:
            chosen = self._draw(states, logits)
        for state, token in zip(states, chosen, strict=True):
            state.produced += 1
            if state.counts is not None:
                state.counts[token] += 1
        logprobs = {requests[row]: _logprobs(raw[row], chosen[row], best) for row, best in wanted.items()}
        return Sampled(requests, tuple(chosen), logprobs)

    def _shape(self, row: Tensor, state: _State) -> None:
        """Penalties and barred end tokens, in place. row: [V]."""
        if state.counts is not None and state.prompt_seen is not None:
            sampling = state.sampling
            output = state.counts > 0
            if sampling.repetition_penalty != 1.0:
                seen = output | state.prompt_seen
                penalty = sampling.repetition_penalty
                row.copy_(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
            row.sub_(state.counts * sampling.frequency_penalty)
            row.sub_(output * sampling.presence_penalty)
        if state.produced < state.min_tokens and state.stop_token_ids:
            row[list(state.stop_token_ids)] = -torch.inf

    def _draw(self, states: list[_State], logits: Tensor) -> list[int]:
        greedy = logits.argmax(-1).tolist()
        return [
            greedy[row] if state.sampling.temperature == 0.0 else _draw_one(logits[row], state)
            for row, state in enumerate(states)
        ]


def _draw_one(row: Tensor, state: _State) -> int:
    """One draw from [V] logits after temperature, top-k, top-p and min-p."""
    sampling = state.sampling
    scaled = row / sampling.temperature
    best = sampling.top_k if 0 < sampling.top_k < row.numel() else 0
    ids: Tensor | None = None
    if best:
        scaled, ids = scaled.topk(best)
    elif sampling.top_p < 1.0:
        scaled, ids = scaled.sort(descending=True)
    weights = torch.softmax(scaled, -1)
    if sampling.top_p < 1.0:
        # The token that reaches top_p is kept, so the likeliest always is.
        weights = torch.where(weights.cumsum(-1) - weights < sampling.top_p, weights, 0.0)
    if sampling.min_p > 0.0:
        weights = torch.where(weights >= sampling.min_p * weights.max(), weights, 0.0)
    generator = torch.Generator().manual_seed((state.seed + GOLDEN * (state.produced + 1)) % 2**63)
    point = torch.rand((), generator=generator, dtype=torch.float64)
    ladder = weights.double().cumsum(-1)
    at = int(torch.searchsorted(ladder, (point.to(ladder.device) * ladder[-1]), right=True))
    at = min(at, int(weights.nonzero()[-1]))
    return at if ids is None else int(ids[at])


def _logprobs(row: Tensor, token: int, best: int) -> Logprobs:
    chosen = row[token]
    top: tuple[tuple[int, float], ...] = ()
    if best:
        values, ids = row.topk(best)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Logprobs(float(chosen), int((row > chosen).sum()) + 1, top)
