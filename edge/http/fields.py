"""Reading the known fields of a JSON object, each with its type and range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.core.errors import Code, EdgeError

_KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def kind(value: Any) -> str:
    return _KINDS[type(value)]


def invalid(param: str, message: str) -> EdgeError:
    return EdgeError(Code.INVALID, message, param=param)


def wrong_type(param: str, expected: str, value: Any) -> EdgeError:
    return invalid(param, f"Invalid type for '{param}': expected {expected}, but got {kind(value)} instead.")


class Fields:
    """One parsed object. null counts as absent, as OpenAI's servers have it; unknown fields are nobody's business.

    Every reader raises EdgeError (INVALID) that names the field.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def flag(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is None or type(value) is bool:
            return value
        raise wrong_type(name, "a boolean", value)

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is None or type(value) is str:
            return value
        raise wrong_type(name, "a string", value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer from `low` to `high`, both included; 5.0 is 5."""
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise wrong_type(name, "an integer", value)
        if not low <= value <= high:
            raise invalid(name, f"Invalid '{name}': expected an integer from {low} to {high}, but got {value}.")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`, both included."""
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is not float and type(value) is not int:
            raise wrong_type(name, "a number", value)
        if not low <= value <= high:
            raise invalid(name, f"Invalid '{name}': expected a number from {low:g} to {high:g}, but got {value}.")
        return float(value)

    def items(self, name: str, at_most: int) -> list[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is not list:
            raise wrong_type(name, "an array", value)
        if len(value) > at_most:
            raise invalid(name, f"Invalid '{name}': at most {at_most} items are allowed, but got {len(value)}.")
        return value

    def members(self, name: str) -> dict[str, Any] | None:
        value = self._values.get(name)
        if value is None or type(value) is dict:
            return value
        raise wrong_type(name, "an object", value)

    def refuse(self, name: str, why: str) -> None:
        """Refuse the field where it asks for anything: null, false, empty and 0 ask for nothing."""
        if self._values.get(name):
            raise invalid(name, f"'{name}' is not supported: {why}")
