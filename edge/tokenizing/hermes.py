"""Hermes' and Qwen's form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, text around them."""

from __future__ import annotations

from collections.abc import Callable

from edge.tokenizing.call_json import CallReader
from edge.tokenizing.tool_deltas import ToolCallArguments, ToolCallStart, ToolDelta, append_content

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """TEXT --<tool_call>--> CALL --object whole or broken--> TEXT, where the first </tool_call> is swallowed.

    An object that breaks before its call has begun is content, its tag included; one that breaks later leaves its call
    as far as it came, and the rest is content.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._held = ""
        self._before = ""  # the current call's opening tag and the white space before it
        self._reader: CallReader | None = None
        self._started = False  # the reader's call has been announced
        self._closes = False  # a call has ended, its closing tag has not come
        self._trims = False  # nothing but white space came since the last call
        self.calls = 0

    def push(self, text: str) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        rest = self._held + text
        self._held = ""
        while rest:
            if self._reader is not None:
                rest = self._read_call(self._reader, rest, deltas)
                continue
            at, tag = self._find_tag(rest)
            if at < 0:
                keep = self._undecided(rest)
                self._emit(rest[: len(rest) - keep], deltas)
                self._held = rest[len(rest) - keep :]
                break
            content = rest[:at].rstrip()
            self._emit(content, deltas)
            self._before, rest = rest[len(content) : at + len(tag)], rest[at + len(tag) :]
            if tag == OPEN:
                self._reader, self._started, self._closes = CallReader(), False, False
            else:
                self._closes = False
        return deltas

    def finish(self) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        if self._reader is not None and not self._started:
            self._emit(self._before + self._reader.text, deltas)
        self._emit(self._held, deltas)
        self._held, self._reader = "", None
        return deltas

    def _read_call(self, reader: CallReader, text: str, deltas: list[ToolDelta]) -> str:
        """Read on in the current call; returns the text behind it."""
        at = 0
        while at < len(text) and not (reader.broken or reader.done):
            reader.feed(text[at])
            at += not reader.broken
        if reader.begun:
            self._announce(reader, deltas)
        if not (reader.done or reader.broken):
            return ""
        if self._started:
            self._closes = self._trims = True
        else:
            self._emit(self._before + reader.text, deltas)
        self._reader = None
        return text[at:]

    def _announce(self, reader: CallReader, deltas: list[ToolDelta]) -> None:
        if not self._started:
            assert reader.name is not None
            self._started = True
            self.calls += 1
            deltas.append(ToolCallStart(self.calls - 1, self._new_id(), reader.name))
        if arguments := reader.take_arguments():
            deltas.append(ToolCallArguments(self.calls - 1, arguments))

    def _find_tag(self, text: str) -> tuple[int, str]:
        at = text.find(OPEN)
        close_at = text.find(CLOSE) if self._closes else -1
        return (close_at, CLOSE) if close_at >= 0 and (at < 0 or close_at < at) else (at, OPEN)

    def _undecided(self, text: str) -> int:
        """How many of the last characters may belong to a tag, or be the white space before one."""
        length = 0
        for tag in (OPEN, CLOSE) if self._closes else (OPEN,):
            at = text.rfind("<", max(0, len(text) - len(tag) + 1))
            if at >= 0 and tag.startswith(text[at:]):
                length = len(text) - at
        before = text[: len(text) - length]
        return length + len(before) - len(before.rstrip())

    def _emit(self, text: str, deltas: list[ToolDelta]) -> None:
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
            append_content(deltas, text)
