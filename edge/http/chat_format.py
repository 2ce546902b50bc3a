"""A chat answer on the wire: chunks, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from edge.core.types import TokenLogprob
from edge.http.choice import Choice
from edge.http.sse import DONE, ChunkFrame, usage_chunk
from edge.http.usage import usage_of
from edge.tokenizing.tool_calls import ContentDelta, ToolCallArguments, ToolCallStart, ToolDelta
from edge.tokenizing.vocabulary import Vocabulary

OPENING = b'"delta":{"role":"assistant","content":"","refusal":null}'
CLOSING = b'"delta":{}'


class ChatFormat:
    """One request's. `prompt_tokens`: of each prompt, so of one."""

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
        self._answer_id = answer_id
        self._created_s = created_s
        self._model = model
        self._vocabulary = vocabulary
        self._prompt_tokens = prompt_tokens
        self._include_usage = include_usage
        members = self._members("chat.completion.chunk")
        self._frames = [ChunkFrame(members, index, null_usage=include_usage) for index in range(choices)]

    def opening(self, choice: Choice) -> bytes:
        return self._frames[choice.index].chunk(OPENING)

    def more(self, choice: Choice) -> bytes:
        """Everything of the choice that was not taken yet; may be nothing."""
        deltas: list[ToolDelta] = choice.text.take()
        frame = self._frames[choice.index]
        if not choice.logprobs:
            if len(deltas) == 1:
                return frame.chunk(_delta(deltas[0]))
            return b"".join([frame.chunk(_delta(delta)) for delta in deltas])
        logprobs = orjson.dumps(self._logprobs(choice.take_logprobs()))
        first, *rest = deltas or [ContentDelta("")]
        return frame.chunk(_delta(first), logprobs) + b"".join([frame.chunk(_delta(delta)) for delta in rest])

    def closing(self, choice: Choice) -> bytes:
        return self._frames[choice.index].chunk(CLOSING, finish_reason=orjson.dumps(choice.finish_reason))

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._include_usage:
            return DONE
        return usage_chunk(self._members("chat.completion.chunk"), usage_of(self._prompt_tokens, choices)) + DONE

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return orjson.dumps(
            {
                **self._members("chat.completion"),
                "choices": [self._choice(choice) for choice in choices],
                "usage": usage_of(self._prompt_tokens, choices),
            }
        )

    def _members(self, kind: str) -> dict[str, object]:
        return {
            "id": self._answer_id,
            "object": kind,
            "created": self._created_s,
            "model": self._model,
            "system_fingerprint": None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        content, calls = "", list[dict[str, Any]]()
        for delta in choice.text.take():
            match delta:
                case ContentDelta(text):
                    content += text
                case ToolCallStart(_, call_id, name):
                    calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
                case ToolCallArguments(index, text):
                    calls[index]["function"]["arguments"] += text
        message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.take_logprobs()) if choice.logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(*top) for top in entry.top]}
                for entry in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _delta(delta: ToolDelta) -> bytes:
    match delta:
        case ContentDelta(text):
            return b'"delta":{"content":%b}' % orjson.dumps(text)
        case ToolCallArguments(index, text):
            arguments = orjson.dumps(text)
            return b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, arguments)
        case ToolCallStart(index, call_id, name):
            head = b'"delta":{"tool_calls":[{"index":%d,"id":%b,"type":"function",' % (index, orjson.dumps(call_id))
            return head + b'"function":{"name":%b,"arguments":""}}]}' % orjson.dumps(name)
