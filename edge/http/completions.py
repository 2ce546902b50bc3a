"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from edge.http.answer import AnswerText
from edge.http.completion_format import CompletionFormat
from edge.http.completion_params import CompletionRequest, Prompt, read_completion
from edge.http.fields import invalid
from edge.http.models import ServedModel
from edge.http.params import AnswerOptions, Bounds
from edge.tokenizing.incremental import pack

IDENTIFYING_LENGTH = 512
"""Characters or token ids at a prompt's beginning that are taken not to change between turns."""


class Completions:
    path = "/v1/completions"
    prefix = "cmpl-"
    content_param = "prompt"

    def read(self, body: Mapping[str, Any], model: ServedModel, bounds: Bounds) -> AskedCompletion:
        request = read_completion(body, model.defaults, bounds)
        for prompt in request.prompts:
            if not isinstance(prompt, str) and max(prompt) >= model.text.vocabulary_size:
                raise invalid(
                    "prompt",
                    f"Invalid 'prompt': {max(prompt)} is no token id of this model, which has "
                    f"{model.text.vocabulary_size} tokens.",
                )
        return AskedCompletion(request, model)


class AskedCompletion:
    def __init__(self, request: CompletionRequest, model: ServedModel) -> None:
        self._request = request
        self._model = model

    @property
    def options(self) -> AnswerOptions:
        return self._request.options

    def identifying_content(self) -> bytes:
        return orjson.dumps(self._request.prompts[0][:IDENTIFYING_LENGTH])

    async def tokenize(self, scope: bytes, tenant: bytes) -> list[bytes]:
        return [await self._tokenize_one(prompt, scope, tenant) for prompt in self._request.prompts]

    async def _tokenize_one(self, prompt: Prompt, scope: bytes, tenant: bytes) -> bytes:
        if not isinstance(prompt, str):
            return pack(list(prompt))
        ids = await self._model.text.tokenize_text_async(prompt, scope=scope, tenant=tenant)
        if not ids:
            raise invalid("prompt", "'prompt' must not be empty.")
        return ids

    def answer_text(self) -> AnswerText:
        return AnswerText(self._model.text.detokenizer(), self.options.stops, None)

    def make_format(
        self, answer_id: str, created_s: int, choices: int, prompt_tokens: Sequence[int]
    ) -> CompletionFormat:
        return CompletionFormat(
            answer_id,
            created_s,
            self._model.name,
            self._model.text.vocabulary,
            choices=choices,
            include_usage=self.options.include_usage,
            prompt_tokens=prompt_tokens,
        )
