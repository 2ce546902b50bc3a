"""What an answer cost, as OpenAI tells it."""

from __future__ import annotations

from collections.abc import Sequence

from edge.http.choice import Choice


def usage_of(prompt_tokens: Sequence[int], choices: Sequence[Choice]) -> dict[str, object]:
    """`prompt_tokens`: of each prompt, which counts once, as its first choice found it, however many answer it."""
    firsts = {choice.prompt: choice for choice in reversed(choices)}
    total_prompt = sum(prompt_tokens)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": total_prompt,
        "completion_tokens": completion,
        "total_tokens": total_prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts.values())},
    }
