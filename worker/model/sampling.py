"""Chooses the next tokens on rank 0 alone, so that ranks cannot differ.

Order, as in transformers: penalties, end tokens barred below `min_tokens`, temperature, top-k, top-p, min-p, then one
draw per request. Frequency and presence penalties count output tokens alone, as OpenAI's do; the repetition penalty
counts the prompt too. Log probabilities are of the model's own logits, before all of these.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.core.types import Logprobs, Request, RequestKey, Sampled, Sampling
from worker.model.drawing import Rule, draw, uniform


@dataclass(slots=True)
class _Penalties:
    """prompt: bool [V], the tokens it has; output: float32 [V], how often each was generated."""

    sampling: Sampling
    prompt: Tensor
    output: Tensor

    def apply(self, row: Tensor) -> None:
        """row: [V], in place."""
        sampling = self.sampling
        generated = self.output > 0
        if sampling.repetition_penalty != 1.0:
            penalty = sampling.repetition_penalty
            lowered = torch.where(row > 0, row / penalty, row * penalty)
            row.copy_(torch.where(generated | self.prompt, lowered, row))
        row.sub_(self.output, alpha=sampling.frequency_penalty)
        row.sub_(generated.to(row.dtype), alpha=sampling.presence_penalty)


@dataclass(slots=True)
class _State:
    """`produced`: output tokens so far, whoever generated them; it numbers this request's draws."""

    sampling: Sampling
    seed: int
    produced: int
    min_tokens: int
    end_tokens: list[int]
    penalties: _Penalties | None

    def rule(self) -> Rule:
        sampling = self.sampling
        point = uniform(self.seed, self.produced)
        return Rule(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, point)


class Sampler:
    """Knows each live request from `add` to `remove`; `sample` records what it chose.

    A request's draws depend on its seed and on how many tokens it has, never on what shares its batch; a seed left out
    is random.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[RequestKey, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request: Request) -> None:
        sampling, stopping = request.sampling, request.stopping
        split = len(request.token_ids) - request.resumed_tokens
        output = request.token_ids[split:].tolist()
        if request.first_token is not None:
            output.append(request.first_token)
        self._states[request.key] = _State(
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            produced=len(output),
            min_tokens=stopping.min_tokens,
            end_tokens=[token for token in stopping.stop_token_ids if token < self._vocab_size],
            penalties=self._penalties(sampling, request.token_ids[:split].tolist(), output),
        )

    def remove(self, key: RequestKey) -> None:
        self._states.pop(key, None)

    @torch.inference_mode()
    def sample(self, requests: tuple[RequestKey, ...], logits: Tensor) -> Sampled:
        """One token a request. `logits`: float32 [R, V], row i of `requests[i]`; they are changed."""
        states = [self._states[key] for key in requests]
        reported = [row for row, state in enumerate(states) if state.sampling.logprobs >= 0]
        raw = torch.log_softmax(logits[reported], -1) if reported else logits[:0]
        for row, state in enumerate(states):
            if state.penalties is not None:
                state.penalties.apply(logits[row])
            if state.produced < state.min_tokens and state.end_tokens:
                logits[row, state.end_tokens] = -torch.inf
        chosen = draw(logits, [state.rule() for state in states])
        for state, token in zip(states, chosen, strict=True):
            state.produced += 1
            if state.penalties is not None:
                state.penalties.output[token] += 1
        bests = [states[row].sampling.logprobs for row in reported]
        found = _logprobs(raw, [chosen[row] for row in reported], bests) if reported else []
        return Sampled(requests, tuple(chosen), {requests[row]: one for row, one in zip(reported, found, strict=True)})

    def _penalties(self, sampling: Sampling, prompt: list[int], output: list[int]) -> _Penalties | None:
        if sampling.repetition_penalty == 1.0 and not sampling.frequency_penalty and not sampling.presence_penalty:
            return None
        seen = torch.zeros(self._vocab_size, dtype=torch.bool)
        seen[prompt] = True
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=self._vocab_size)
        return _Penalties(sampling, seen.to(self._device), counts.to(self._device, torch.float32))


def _logprobs(raw: Tensor, chosen: Sequence[int], bests: Sequence[int]) -> list[Logprobs]:
    """raw: log probabilities [R, V]; of each row's chosen token and of its best ones."""
    own = raw.gather(1, torch.tensor(chosen, device=raw.device)[:, None])
    ranks = ((raw > own).sum(-1) + 1).tolist()
    values, ids = (top.tolist() for top in raw.topk(min(max(bests), raw.shape[1])))
    return [
        Logprobs(value, rank, tuple(zip(ids[row][:best], values[row][:best], strict=True)))
        for row, (value, rank, best) in enumerate(zip(own[:, 0].tolist(), ranks, bests, strict=True))
    ]
