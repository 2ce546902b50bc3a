"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from edge.http.answer import AnswerText
from edge.http.chat_format import ChatFormat
from edge.http.chat_params import ChatRequest, read_chat
from edge.http.fields import invalid
from edge.http.models import ServedModel
from edge.http.params import AnswerOptions, Bounds


class Chat:
    path = "/v1/chat/completions"
    prefix = "chatcmpl-"
    content_param = "messages"

    def read(self, body: Mapping[str, Any], model: ServedModel, bounds: Bounds) -> AskedChat:
        request = read_chat(body, model.defaults, bounds)
        if request.tools and not model.text.supports_tools:
            raise invalid("tools", f"The model '{model.name}' cannot call tools: its template does not show them.")
        return AskedChat(request, model)


class AskedChat:
    def __init__(self, request: ChatRequest, model: ServedModel) -> None:
        self._request = request
        self._model = model

    @property
    def options(self) -> AnswerOptions:
        return self._request.options

    def identifying_content(self) -> bytes:
        messages = self._request.messages
        first_user = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
        opening = [message for message in messages[:first_user] if message["role"] == "system"]
        return orjson.dumps([self._request.tools, opening, messages[first_user].get("content")])

    async def tokenize(self, scope: bytes, tenant: bytes) -> list[bytes]:
        request, text = self._request, self._model.text
        tools = request.tools or None
        return [await text.tokenize_chat_async(request.messages, tools, scope=scope, tenant=tenant)]

    def answer_text(self) -> AnswerText:
        text, names = self._model.text, self._request.tool_names
        parser = text.tool_call_parser(names) if names else None
        return AnswerText(text.detokenizer(tools=bool(names)), self.options.stops, parser)

    def make_format(self, answer_id: str, created_s: int, choices: int, prompt_tokens: Sequence[int]) -> ChatFormat:
        return ChatFormat(
            answer_id,
            created_s,
            self._model.name,
            self._model.text.vocabulary,
            choices=choices,
            include_usage=self.options.include_usage,
            prompt_tokens=prompt_tokens,
        )
