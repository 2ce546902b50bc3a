"""The fields of POST /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge.http.fields import Fields, invalid, kind, wrong_type
from edge.http.params import MAX_TOKENS, AnswerOptions, Bounds, Defaults, read_options

MAX_TOOLS = 256
MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`tools` is empty where the caller named none or wants none called."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: AnswerOptions

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


def read_chat(body: Mapping[str, Any], defaults: Defaults, bounds: Bounds) -> ChatRequest:
    """Raises EdgeError naming the field."""
    fields = Fields(body)
    model = fields.text("model")
    if not model:
        raise invalid("model", "You must provide a model parameter.")
    fields.refuse("functions", "use 'tools'.")
    fields.refuse("function_call", "use 'tool_choice'.")
    fields.refuse("audio", "answers are text.")
    if "audio" in (fields.items("modalities", 8) or []):
        raise invalid("modalities", "'modalities' may only hold \"text\": answers are text.")
    max_tokens = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens", 1, MAX_TOKENS)
    return ChatRequest(
        model=model,
        messages=_messages(fields, bounds),
        tools=_tools(fields),
        options=read_options(fields, defaults, bounds, max_tokens=max_tokens, logprobs=_logprobs(fields)),
    )


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs") or False
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return (top or 0) if wanted else None


def _messages(fields: Fields, bounds: Bounds) -> list[dict[str, Any]]:
    """The messages, `developer` being today's name for `system`, which is the one that templates know."""
    messages = fields.items("messages", bounds.messages)
    if not messages:
        raise invalid("messages", "'messages' must hold at least one message.")
    for at, message in enumerate(messages):
        if type(message) is not dict:
            raise wrong_type(f"messages[{at}]", "an object", message)
        role = message.get("role")
        if role not in ROLES:
            _refuse_role(f"messages[{at}].role", role)
        if role == "developer":
            messages[at] = {**message, "role": "system"}
        content = message.get("content")
        if content is not None and type(content) is not str and type(content) is not list:
            raise wrong_type(f"messages[{at}].content", "a string or an array of text parts", content)
        if content is None and role not in ("assistant", "function"):
            raise invalid(f"messages[{at}].content", f"'messages[{at}].content' is missing.")
        if message.get("tool_calls") is not None:
            _require_calls(message["tool_calls"], f"messages[{at}].tool_calls")
    return messages


def _refuse_role(param: str, role: Any) -> None:
    if type(role) is not str:
        raise wrong_type(param, "a string", role)
    raise invalid(param, f"Invalid '{param}': expected one of {', '.join(ROLES)}.")


def _require_calls(calls: Any, param: str) -> None:
    if type(calls) is not list:
        raise wrong_type(param, "an array", calls)
    for at, call in enumerate(calls):
        if type(call) is not dict or type(call.get("function")) is not dict:
            raise invalid(f"{param}[{at}]", f"Invalid '{param}[{at}]': expected an object with 'function'.")


def _tools(fields: Fields) -> list[dict[str, Any]]:
    tools = fields.items("tools", MAX_TOOLS) or []
    for at, tool in enumerate(tools):
        _require_tool(tool, f"tools[{at}]")
    choice = fields.get("tool_choice")
    fields.flag("parallel_tool_calls")
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return []
    if choice == "required" or type(choice) is dict:
        raise invalid("tool_choice", '\'tool_choice\' cannot force a call yet: use "auto" or "none".')
    if type(choice) is not str:
        raise wrong_type("tool_choice", "a string or an object", choice)
    raise invalid("tool_choice", 'Invalid \'tool_choice\': expected "auto" or "none".')


def _require_tool(tool: Any, param: str) -> None:
    if type(tool) is not dict:
        raise wrong_type(param, "an object", tool)
    if tool.get("type") != "function":
        raise invalid(f"{param}.type", f"Invalid '{param}.type': only \"function\" is supported.")
    function = tool.get("function")
    if type(function) is not dict:
        raise wrong_type(f"{param}.function", "an object", function)
    name = function.get("name")
    if type(name) is not str:
        raise wrong_type(f"{param}.function.name", "a string", name)
    if not _TOOL_NAME.fullmatch(name):
        raise invalid(
            f"{param}.function.name",
            f"Invalid '{param}.function.name': expected 1 to 128 letters, digits, underscores, dots and dashes.",
        )
    for member, expected in (("description", str), ("parameters", dict)):
        value = function.get(member)
        if value is not None and type(value) is not expected:
            raise wrong_type(f"{param}.function.{member}", kind(expected()), value)
