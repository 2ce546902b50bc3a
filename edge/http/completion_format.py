"""A plain completion on the wire: chunks, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from edge.core.types import TokenLogprob
from edge.http.choice import Choice
from edge.http.sse import DONE, ChunkFrame, usage_chunk
from edge.http.usage import usage_of
from edge.tokenizing.tool_calls import ContentDelta
from edge.tokenizing.vocabulary import Vocabulary


class CompletionFormat:
    """One request's. `prompt_tokens`: of each prompt; `choices` counts those of all prompts together."""

    def __init__(
        self,
        answer_id: str,
        created_s: int,
        model: str,
        vocabulary: Vocabulary,
        *,
        choices: int,
        include_usage: bool,
        prompt_tokens: Sequence[int],
    ) -> None:
        self._members = {
            "id": answer_id,
            "object": "text_completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": None,
        }
        self._vocabulary = vocabulary
        self._prompt_tokens = prompt_tokens
        self._include_usage = include_usage
        self._frames = [ChunkFrame(self._members, index, null_usage=include_usage) for index in range(choices)]
        self._offsets = [0] * choices  # where the next token's text begins in the choice's answer

    def opening(self, choice: Choice) -> bytes:
        """Nothing: a completion has no role to tell."""
        return b""

    def more(self, choice: Choice) -> bytes:
        """Everything of the choice that was not taken yet; may be nothing."""
        text = _text(choice)
        if not choice.logprobs:
            return self._frames[choice.index].chunk(b'"text":' + orjson.dumps(text)) if text else b""
        logprobs = orjson.dumps(self._logprobs(choice))
        return self._frames[choice.index].chunk(b'"text":' + orjson.dumps(text), logprobs)

    def closing(self, choice: Choice) -> bytes:
        return self._frames[choice.index].chunk(b'"text":""', finish_reason=orjson.dumps(choice.finish_reason))

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._include_usage:
            return DONE
        return usage_chunk(self._members, usage_of(self._prompt_tokens, choices)) + DONE

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return orjson.dumps(
            {
                **self._members,
                "choices": [
                    {
                        "index": choice.index,
                        "text": _text(choice),
                        "logprobs": self._logprobs(choice) if choice.logprobs else None,
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": usage_of(self._prompt_tokens, choices),
            }
        )

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        entries: list[TokenLogprob] = choice.take_logprobs()
        tokens = [self._vocabulary.token_text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._vocabulary.token_text(token_id): logprob for token_id, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }


def _text(choice: Choice) -> str:
    return "".join([delta.text for delta in choice.text.take() if isinstance(delta, ContentDelta)])
