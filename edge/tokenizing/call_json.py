"""One call's JSON object, read character by character: its name, then its arguments while they come."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
WHITE = frozenset(" \t\r\n")
CLOSES = {"{": "}", "[": "]"}


class _State(enum.Enum):
    START = enum.auto()  # before {
    KEY = enum.auto()  # before a key, or the } of an empty object
    COLON = enum.auto()
    VALUE = enum.auto()  # before a value's first character
    INSIDE = enum.auto()  # in a value, or in a key, which is a value here
    COMMA = enum.auto()  # before , or }
    DONE = enum.auto()
    BROKEN = enum.auto()


class CallReader:
    """START {KEY COLON VALUE INSIDE COMMA}* DONE; whatever does not fit leads to BROKEN, for good.

    Checks the object itself; of values, only that they end. `name` is set once it is known. A call has `begun` when
    its name is known and its arguments have begun, or when the object is whole; `take_arguments` is for then. Arguments
    that are a string with JSON in it, as some models write, come out as what the string holds, once it is whole.
    `names`: the only names there are, if given; any other breaks the object.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.name: str | None = None
        self._names = names
        self._state = _State.START
        self._read: list[str] = []
        self._key: str | None = None  # of the value being read; None: a key is being read
        self._value: list[str] = []
        self._brackets: list[str] = []  # that must close, innermost last
        self._quoted = False
        self._escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self._streams = False

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def broken(self) -> bool:
        return self._state is _State.BROKEN

    @property
    def begun(self) -> bool:
        return self.name is not None and (self._has_arguments or self.done)

    @property
    def text(self) -> str:
        """All that was read, without the character that broke it."""
        return "".join(self._read)

    def take_arguments(self) -> str:
        """What is new of the arguments' JSON text. A whole object without arguments has {}."""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            self._arguments.append("{}")
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, character: str) -> None:
        """Read one character."""
        assert not self.done, "the object has ended"
        if self._state is _State.INSIDE:
            self._feed_value(character)
        elif character not in WHITE:
            self._feed_between(character)
        if not self.broken:
            self._read.append(character)

    def _feed_between(self, character: str) -> None:
        match self._state, character:
            case _State.START, "{":
                self._state = _State.KEY
            case _State.KEY, '"':
                self._begin_value(None, character)
            case ((_State.KEY | _State.COMMA), "}"):
                self._state = _State.DONE if self.name is not None else _State.BROKEN
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.COMMA, ",":
                self._state = _State.KEY
            case _State.VALUE, _ if character not in ",:}]":
                self._begin_value(self._key, character)
            case _:
                self._state = _State.BROKEN

    def _begin_value(self, key: str | None, character: str) -> None:
        self._state = _State.INSIDE
        self._key = key
        self._value = [character]
        self._quoted = character == '"'
        if character in CLOSES:
            self._brackets.append(CLOSES[character])
            if key in ARGUMENT_KEYS and not self._has_arguments:
                self._has_arguments = self._streams = True
                self._arguments.append(character)

    def _feed_value(self, character: str) -> None:
        if not self._quoted and not self._brackets and (character in WHITE or character in ",}]"):
            self._end_value()  # a number or a word, which ends before this character
            if not self.broken and character not in WHITE:
                self._feed_between(character)
            return
        self._value.append(character)
        if self._streams:
            self._arguments.append(character)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
                if not self._brackets:
                    self._end_value()
        elif character == '"':
            self._quoted = True
        elif character in CLOSES:
            self._brackets.append(CLOSES[character])
        elif character in "}]":
            self._close_bracket(character)

    def _close_bracket(self, character: str) -> None:
        if not self._brackets or self._brackets.pop() != character:
            if self._streams:
                self._arguments.pop()
            self._state = _State.BROKEN
        elif not self._brackets:
            self._end_value()

    def _end_value(self) -> None:
        text = "".join(self._value)
        self._state = _State.COLON if self._key is None else _State.COMMA
        if self._streams:
            self._streams = False
            return
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            self._state = _State.BROKEN
            return
        if self._key is None:
            self._key = value
        elif self._key == "name" and self.name is None:
            self._take_name(value)
        elif self._key in ARGUMENT_KEYS and not self._has_arguments and value is not None:
            self._has_arguments = True
            self._arguments.append(value if isinstance(value, str) else text)

    def _take_name(self, value: object) -> None:
        if isinstance(value, str) and (self._names is None or value in self._names):
            self.name = value
        else:
            self._state = _State.BROKEN
