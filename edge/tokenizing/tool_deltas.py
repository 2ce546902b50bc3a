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


def append_content(deltas: list[ToolDelta], text: str) -> None:
    """Add text to the deltas, into the last one if that is text too."""
    if not text:
        return
    if deltas and isinstance(last := deltas[-1], ContentDelta):
        deltas[-1] = ContentDelta(last.text + text)
    else:
        deltas.append(ContentDelta(text))
