"""Tool calls in an answer's text, found while it streams.

What comes out does not depend on how the text was cut into pushes, and nothing is lost: text that turns out to be no
call comes out as content. White space around calls belongs to them.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Collection
from typing import Protocol

from edge.tokenizing.hermes import HermesParser
from edge.tokenizing.llama3 import Llama3Parser
from edge.tokenizing.tool_deltas import ContentDelta, ToolCallArguments, ToolCallStart, ToolDelta

__all__ = [
    "ContentDelta",
    "ToolCallArguments",
    "ToolCallParser",
    "ToolCallStart",
    "ToolDelta",
    "ToolFormat",
    "detect_format",
    "make_parser",
    "new_call_id",
]


class ToolFormat(enum.StrEnum):
    """How a model writes calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


class ToolCallParser(Protocol):
    """One answer. `calls` counts those that have begun: above 0, the finish reason is `tool_calls`."""

    @property
    def calls(self) -> int: ...

    def push(self, text: str) -> list[ToolDelta]: ...

    def finish(self) -> list[ToolDelta]:
        """The answer ended: the rest, as what it can be at best."""
        ...


MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3: ("<|python_tag|>",),
}
"""What the parser must see of a format even if it is a special token."""


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model; None: one that is not read here, so calls stay text."""
    if "<function=" in template:
        return None
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return ToolFormat.LLAMA3
    return None


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def make_parser(
    tool_format: ToolFormat, tool_names: Collection[str], new_id: Callable[[], str] = new_call_id
) -> ToolCallParser:
    """A parser for one answer to a request that has tools of these names."""
    match tool_format:
        case ToolFormat.HERMES:
            return HermesParser(new_id)
        case ToolFormat.LLAMA3:
            return Llama3Parser(tool_names, new_id)
