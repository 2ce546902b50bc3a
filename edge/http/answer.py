"""The text of one choice: token ids in; text and tool calls out, stop strings found on the way."""

from __future__ import annotations

from collections.abc import Sequence

from edge.tokenizing.detokenizer import Detokenizer
from edge.tokenizing.stops import StopStrings
from edge.tokenizing.tool_calls import ContentDelta, ToolCallArguments, ToolCallParser, ToolDelta


class AnswerText:
    """Collects what a choice says until somebody takes it, so that a slow reader gets few and large pieces.

    `pending_chars`: how much waits to be taken. After `push` returned True, or after `finish`, nothing may be pushed.
    """

    __slots__ = ("_deltas", "_detokenizer", "_parser", "_stops", "_text", "pending_chars")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], parser: ToolCallParser | None) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._parser = parser
        self._text = ""
        self._deltas: list[ToolDelta] = []
        self.pending_chars = 0

    @property
    def calls_tools(self) -> bool:
        return self._parser is not None and self._parser.calls > 0

    def push(self, token_ids: Sequence[int]) -> bool:
        """True if a stop string ended the answer."""
        return self._add(self._detokenizer.push(token_ids))

    def finish(self) -> bool:
        """No token follows: what was held back comes out. True if a stop string was in it, which ends it there."""
        if self._add(self._detokenizer.finish()):
            return True
        matched = None
        if self._stops is not None:
            rest, matched = self._stops.finish()
            self._pass_on(rest)
        self._end_calls()
        return matched is not None

    def take(self) -> list[ToolDelta]:
        """What came since the last call, neighbours of one kind merged."""
        self.pending_chars = 0
        if self._parser is None:
            text, self._text = self._text, ""
            return [ContentDelta(text)] if text else []
        deltas, self._deltas = self._deltas, []
        return merged(deltas) if len(deltas) > 1 else deltas

    def _add(self, text: str) -> bool:
        if not text:
            return False
        matched = None
        if self._stops is not None:
            text, matched = self._stops.push(text)
        self._pass_on(text)
        if matched is not None:
            self._end_calls()
        return matched is not None

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        self.pending_chars += len(text)
        if self._parser is None:
            self._text += text
        else:
            self._deltas += self._parser.push(text)

    def _end_calls(self) -> None:
        if self._parser is not None:
            self._deltas += self._parser.finish()


def merged(deltas: Sequence[ToolDelta]) -> list[ToolDelta]:
    """The same stream in as few deltas as its order allows."""
    result: list[ToolDelta] = []
    for delta in deltas:
        last = result[-1] if result else None
        match last, delta:
            case ContentDelta(before), ContentDelta(text):
                result[-1] = ContentDelta(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, text) if index == same:
                result[-1] = ToolCallArguments(index, before + text)
            case _:
                result.append(delta)
    return result
