"""How long a request wants its blocks kept: the words, their form in JSON, and the bounds of a tenant. Pure.

    {"token_range_retention_configs": [{"token_start": 0, "token_end": 1000, "priority": 80, "duration_ms": 60000}],
     "decode_retention_priority": 35, "decode_duration_ms": null}

or, for the whole request, {"priority": 80, "duration_ms": 60000}. A block goes by the token that it begins with: a
range rules the blocks whose first token it holds. Durations count from when the last request lets go of a block; null
is for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

FIELD = "kv_cache_retention_config"
DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
MAX_RANGES = 64
MAX_TOKEN = 1 << 31
MAX_DURATION_MS = 31 * 24 * 3_600_000

RANGE_MEMBERS = ("token_start", "token_end", "priority", "duration_ms")
DETAILED_MEMBERS = ("token_range_retention_configs", "decode_retention_priority", "decode_duration_ms")
WHOLE_MEMBERS = ("priority", "duration_ms")
KINDS = {str: "a string", bool: "a boolean", list: "an array", dict: "an object", type(None): "null"}


class RetentionError(Exception):
    """Raised when a request's retention is not one: `path` names the member, the message says what is allowed."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Blocks that begin in the prompt's tokens [start, stop) have `priority`; `stop` None: to its end.

    `duration_ms`: for so long after the last request lets go of them, in plan time; 0: for ever.
    """

    start: int
    stop: int | None
    priority: int
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request asks for its blocks, 0 to 100; later ranges win. `decode_*`: of what it generates."""

    ranges: tuple[TokenRange, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class RetentionBounds:
    """What a tenant may ask. `max_duration_ms`: how long a priority above the default may hold, so that none holds for
    ever; None: durations are not taken, and what is asked holds for ever."""

    max_priority: int = DEFAULT_PRIORITY
    max_duration_ms: int | None = None

    def clamp(self, asked: Retention) -> Retention:
        decode_priority, decode_duration_ms = self._clamped(asked.decode_priority, asked.decode_duration_ms)
        return Retention(tuple(self._clamped_range(one) for one in asked.ranges), decode_priority, decode_duration_ms)

    def _clamped_range(self, asked: TokenRange) -> TokenRange:
        priority, duration_ms = self._clamped(asked.priority, asked.duration_ms)
        return replace(asked, priority=priority, duration_ms=duration_ms)

    def _clamped(self, priority: int, duration_ms: int) -> tuple[int, int]:
        priority = min(priority, self.max_priority)
        if self.max_duration_ms is None:
            return priority, 0
        if not duration_ms and priority > DEFAULT_PRIORITY:
            return priority, self.max_duration_ms
        return priority, min(duration_ms, self.max_duration_ms)


DEFAULT_BOUNDS = RetentionBounds()


def read_retention(value: Any, path: str = FIELD) -> Retention:
    """From parsed JSON. Raises RetentionError, naming the member, its value and what is allowed."""
    fields = _Object(value, path, DETAILED_MEMBERS + WHOLE_MEMBERS)
    if any(fields.has(name) for name in WHOLE_MEMBERS):
        fields.refuse(DETAILED_MEMBERS, f"{' and '.join(WHOLE_MEMBERS)} are for the whole request")
        priority, duration_ms = fields.priority("priority", None), fields.duration("duration_ms")
        return Retention((TokenRange(0, None, priority, duration_ms),), priority, duration_ms)
    return Retention(
        _ranges(fields),
        fields.priority("decode_retention_priority", DEFAULT_PRIORITY),
        fields.duration("decode_duration_ms"),
    )


def write_retention(retention: Retention) -> dict[str, Any]:
    """As `read_retention` reads it."""
    return {
        "token_range_retention_configs": [
            {
                "token_start": one.start,
                "token_end": one.stop,
                "priority": one.priority,
                "duration_ms": one.duration_ms or None,
            }
            for one in retention.ranges
        ],
        "decode_retention_priority": retention.decode_priority,
        "decode_duration_ms": retention.decode_duration_ms or None,
    }


def _ranges(fields: _Object) -> tuple[TokenRange, ...]:
    name = "token_range_retention_configs"
    items, path = fields.get(name), fields.path_of(name)
    if items is None:
        return ()
    if type(items) is not list:
        raise _wrong(path, "an array", items)
    if len(items) > MAX_RANGES:
        raise RetentionError(path, f"Invalid '{path}': at most {MAX_RANGES} ranges are allowed, but got {len(items)}.")
    return tuple(_range(_Object(item, f"{path}[{at}]", RANGE_MEMBERS)) for at, item in enumerate(items))


def _range(fields: _Object) -> TokenRange:
    start = fields.integer("token_start", 0, MAX_TOKEN, 0)
    stop = fields.integer("token_end", start + 1, MAX_TOKEN, None) if fields.has("token_end") else None
    return TokenRange(start, stop, fields.priority("priority", None), fields.duration("duration_ms"))


class _Object:
    """One JSON object with known members; null counts as absent."""

    def __init__(self, value: Any, path: str, known: tuple[str, ...]) -> None:
        if type(value) is not dict:
            raise _wrong(path, "an object", value)
        for name in value:
            if name not in known:
                raise RetentionError(
                    f"{path}.{name[:80]}", f"Unknown member '{path}.{name[:80]}': known are {', '.join(known)}."
                )
        self._value = value
        self._path = path

    def path_of(self, name: str) -> str:
        return f"{self._path}.{name}"

    def get(self, name: str) -> Any:
        return self._value.get(name)

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if self.has(name):
                path = self.path_of(name)
                raise RetentionError(path, f"'{path}' cannot be given too: {why}.")

    def priority(self, name: str, default: int | None) -> int:
        return self.integer(name, 0, MAX_PRIORITY, default)

    def duration(self, name: str) -> int:
        """0 where it is absent: for ever."""
        return self.integer(name, 1, MAX_DURATION_MS, 0)

    def integer(self, name: str, low: int, high: int, default: int | None) -> int:
        """`default` None: it must be there. 5.0 is 5."""
        value, path = self._value.get(name), self.path_of(name)
        if value is None and default is not None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise _wrong(path, f"an integer from {low} to {high}", value)
        if not low <= value <= high:
            raise RetentionError(path, f"Invalid '{path}': expected an integer from {low} to {high}, but got {value}.")
        return value


def _wrong(path: str, expected: str, value: Any) -> RetentionError:
    got = KINDS.get(type(value), str(value)[:40])
    return RetentionError(path, f"Invalid '{path}': expected {expected}, but got {got}.")
