"""OpenAI's messages in the shape that a model's template reads, found out by rendering small probes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.core.errors import Code, EdgeError
from edge.tokenizing.template import ChatTemplate

PROBE = "kinroute_probe"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}
RAW_ARGUMENTS = '{"city": "a"}'
USER = {"role": "user", "content": "hello"}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What one template takes. Where it takes several forms, the one that changes the caller's text least."""

    supports_tools: bool
    takes_strings: bool
    takes_parts: bool
    takes_raw_arguments: bool
    missing_content: str | None
    """What stands for an assistant's missing content beside tool calls; None: nothing does."""

    @classmethod
    def of(cls, template: ChatTemplate) -> TemplateTraits:
        parts = [{"type": "text", "text": PROBE}]
        with_parts = _try(template, [{"role": "user", "content": parts}])
        plain, with_tool = _try(template, [USER]), _try(template, [USER], [PROBE_TOOL])
        missing, raw = _call_traits(template)
        return cls(
            supports_tools=with_tool is not None and with_tool != plain,
            takes_strings=PROBE in (_try(template, [{"role": "user", "content": PROBE}]) or ""),
            takes_parts=with_parts is not None and PROBE in with_parts and "'text'" not in with_parts,
            takes_raw_arguments=raw,
            missing_content=missing,
        )

    def shape(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template takes them; the caller's are not changed. What is null counts as absent.

        Raises EdgeError (INVALID, naming the message) for what no template could render.
        """
        return [self._shape_one(message, f"messages[{at}]") for at, message in enumerate(messages)]

    def _shape_one(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        shaped = {
            name: value for name, value in message.items() if value is not None and (value or name != "tool_calls")
        }
        if "content" in shaped:
            shaped["content"] = self._content(shaped["content"], f"{where}.content")
        elif not shaped.get("tool_calls"):
            shaped["content"] = ""
        elif self.missing_content is not None:
            shaped["content"] = self.missing_content
        if shaped.get("tool_calls"):
            calls = shaped["tool_calls"]
            shaped["tool_calls"] = [self._call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        return shaped

    def _content(self, content: Any, where: str) -> Any:
        if isinstance(content, str):
            return content if self.takes_strings or not self.takes_parts else [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise _invalid(f"{where} must be a string or a list of text parts.", where)
        texts = [_part_text(part, f"{where}[{at}]") for at, part in enumerate(content)]
        if self.takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid(f"{where}.function needs a name.", where)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self.takes_raw_arguments:
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise _invalid(f"{where}.function.arguments is not JSON.", where) from None
        return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind in ("text", "input_text", "output_text") else None
    if kind == "refusal":
        text = part.get("refusal")
    if not isinstance(text, str):
        raise _invalid(f"{where}: only parts of type text with a string `text` are served, not {kind!r}.", where)
    return text


def _call_traits(template: ChatTemplate) -> tuple[str | None, bool]:
    """How an assistant's tool call without content must look: (what stands for the content, arguments as a string)."""
    forms: list[tuple[str | None, Any]] = [
        (missing, arguments) for arguments in (RAW_ARGUMENTS, json.loads(RAW_ARGUMENTS)) for missing in (None, "")
    ]
    for missing, arguments in forms:
        call = {"id": "call00001", "type": "function", "function": {"name": PROBE, "arguments": arguments}}
        message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
        if missing is not None:
            message["content"] = missing
        text = _try(template, [USER, message], [PROBE_TOOL], add_generation_prompt=False)
        without = _try(template, [USER], [PROBE_TOOL], add_generation_prompt=False) or ""
        if text is None or text.count(PROBE) <= without.count(PROBE):
            continue
        if RAW_ARGUMENTS in text or not isinstance(arguments, str):
            return missing, isinstance(arguments, str)
    return "", False


def _try(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str | None:
    """The rendered probe; None where the template refuses it."""
    try:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except EdgeError:
        return None


def _invalid(message: str, where: str) -> EdgeError:
    return EdgeError(Code.INVALID, message, param=where)
