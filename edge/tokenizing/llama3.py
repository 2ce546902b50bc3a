"""Llama 3's form: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `;` between them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

from edge.tokenizing.call_json import WHITE, CallReader
from edge.tokenizing.tool_deltas import ToolCallArguments, ToolCallStart, ToolDelta, append_content

TAG = "<|python_tag|>"


class _State(enum.Enum):
    BEFORE = enum.auto()  # before a call's {, with perhaps a tag or a ; before it
    CALL = enum.auto()
    TEXT = enum.auto()  # no calls (any more)


class Llama3Parser:
    """BEFORE --{--> CALL --object whole--> BEFORE ...; whatever does not fit leads to TEXT, with all that was held.

    Only names of the request's tools are calls: an answer may be JSON of the user's own.
    """

    def __init__(self, tool_names: Collection[str], new_id: Callable[[], str]) -> None:
        self._names = frozenset(tool_names)
        self._new_id = new_id
        self._state = _State.BEFORE
        self._before = ""
        self._reader = CallReader(self._names)
        self._started = False
        self.calls = 0

    def push(self, text: str) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        for at, character in enumerate(text):
            if self._state is _State.BEFORE:
                self._read_before(character, deltas)
            elif self._state is _State.CALL:
                self._read_call(character, deltas)
            else:
                append_content(deltas, text[at:])
                return deltas
        if self._state is _State.CALL:
            self._announce(deltas)
        return deltas

    def finish(self) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        if self._state is _State.CALL and not self._started:
            self._give_up(self._reader.text, deltas)
        elif self._state is _State.BEFORE and not (self.calls and not self._before.strip()):
            self._give_up("", deltas)
        return deltas

    def _read_before(self, character: str, deltas: list[ToolDelta]) -> None:
        if character == "{" and self._fits(self._before):
            self._state = _State.CALL
            self._reader, self._started = CallReader(self._names), False
            self._reader.feed(character)
            return
        self._before += character
        if character not in WHITE and not self._may_fit(self._before):
            self._give_up("", deltas)

    def _fits(self, before: str) -> bool:
        """Whether a call may begin after this."""
        before = before.strip()
        return before in ("", TAG) or (self.calls > 0 and before in (";", f";{TAG}"))

    def _may_fit(self, before: str) -> bool:
        before = before.lstrip()
        if self.calls:
            before = before.removeprefix(";").lstrip()
        return TAG.startswith(before.rstrip())

    def _read_call(self, character: str, deltas: list[ToolDelta]) -> None:
        self._reader.feed(character)
        if self._reader.broken:
            self._announce(deltas)
            self._give_up(character if self._started else self._reader.text + character, deltas)
        elif self._reader.done:
            self._announce(deltas)
            self._state, self._before = _State.BEFORE, ""

    def _announce(self, deltas: list[ToolDelta]) -> None:
        if not self._reader.begun:
            return
        if not self._started:
            assert self._reader.name is not None
            self._started = True
            self._before = ""
            self.calls += 1
            deltas.append(ToolCallStart(self.calls - 1, self._new_id(), self._reader.name))
        if arguments := self._reader.take_arguments():
            deltas.append(ToolCallArguments(self.calls - 1, arguments))

    def _give_up(self, rest: str, deltas: list[ToolDelta]) -> None:
        self._state = _State.TEXT
        append_content(deltas, self._before + rest)
        self._before = ""
