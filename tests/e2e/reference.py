"""What `transformers` itself would answer, and how a worker's answer is held against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""


class Reference:
    """The same model folder, run whole in this process, float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy, `count` tokens, end tokens ignored."""
        output = self._model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(prompt) :]]

    @torch.no_grad()
    def ties(self, prompt: list[int], answer: list[int]) -> list[bool]:
        """For each token of `answer`: could the runner-up have been chosen as well?"""
        logits = self._model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, dim=-1).values
        return [bool(tie) for tie in (best[:, 0] - best[:, 1]) < TIE]


def assert_same_answer(
    reference: Reference, prompt: list[int], got: list[int], ask: Callable[[list[int], int], list[int]]
) -> None:
    """`got` is the reference's answer, token for token; after a tie that went the other way, `ask` again from the
    reference's token on, so that everything behind it is compared too."""
    expected = reference.generate(prompt, len(got))
    done = 0
    while got != expected[done:]:
        first = next(i for i, (ours, theirs) in enumerate(zip(got, expected[done:], strict=True)) if ours != theirs)
        at = done + first
        assert reference.ties(prompt, expected)[at], f"token {at}: {got[first]} instead of {expected[at]}, no tie"
        done = at + 1
        if done == len(expected):
            return
        got = ask(prompt + expected[:done], len(expected) - done)
