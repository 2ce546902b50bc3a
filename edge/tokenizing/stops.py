"""Stop strings, found across token boundaries without ever sending a part of one."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStrings:
    """Passes an answer's text on until a stop string begins in it.

    The match that begins first wins; of several that begin together, the shortest. Text is held back only while it may
    still be the beginning of a match, so the result does not depend on how the text was cut into pushes. Cost is linear
    in the text, whatever the stops (Knuth-Morris-Pratt, one automaton a stop).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every answer"
        self._stops = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        firsts = sorted({stop[0] for stop in stops})
        self._begins = re.compile("|".join(map(re.escape, firsts))).search
        self._held = ""
        self._match: tuple[int, str] | None = None  # where in _held a whole stop begins, and which

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string that ends the answer, if one does.

        After a match nothing may be pushed any more: what followed the stop string is dropped.
        """
        if not self._stops:
            return text, None
        if not self._held and self._begins(text) is None:
            return text, None
        start = len(self._held)
        self._held += text
        for end, character in enumerate(text, start + 1):
            for stop in self._stops:
                if stop.feed(character):
                    begin = end - len(stop.text)
                    if self._match is None or begin < self._match[0]:
                        self._match = begin, stop.text
            if self._match is not None and self._first_possible(end) >= self._match[0]:
                return self._end()
        keep = self._first_possible(len(self._held))
        if self._match is not None:
            self._match = self._match[0] - keep, self._match[1]
        emit, self._held = self._held[:keep], self._held[keep:]
        return emit, None

    def finish(self) -> tuple[str, str | None]:
        """The answer ended: what was held back, up to a stop string that is whole but had to wait for a longer one."""
        if self._match is not None:
            return self._end()
        held, self._held = self._held, ""
        return held, None

    def _first_possible(self, end: int) -> int:
        """Where in the held text, of which `end` characters were read, the longest unfinished stop string begins."""
        return end - max(stop.matched for stop in self._stops)

    def _end(self) -> tuple[str, str]:
        assert self._match is not None
        begin, stop = self._match
        emit, self._held = self._held[:begin], ""
        return emit, stop


class _Automaton:
    """How much of one stop string the text read so far ends with: `matched` characters, never all of them."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * (len(text) + 1)  # [n]: the longest proper prefix that the first n characters end with
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._fallback[length]
            length += text[at] == text[length]
            self._fallback[at + 1] = length

    def feed(self, character: str) -> bool:
        """Read one character; True if the whole stop string ends with it."""
        text, matched = self.text, self.matched
        while matched and text[matched] != character:
            matched = self._fallback[matched]
        matched += text[matched] == character
        whole = matched == len(text)
        self.matched = 0 if whole else matched  # a later match of the same stop begins later, too late to win
        return whole
