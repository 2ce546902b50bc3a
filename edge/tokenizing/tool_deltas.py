"""What a stream of text with tool calls in it is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the answer's calls from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments' JSON text of a call that has begun, as the model wrote it."""

    index: int
    text: str


ToolDelta = ContentDelta | ToolCallStart | ToolCallArguments
