"""Classes of conversations: what is known of one when its turn is over, from coarse to fine, as one number.

Where the last answer's stop reason is known it tells most, then what the children do. Where it is not, the shape of the
traffic has to do: turns, lengths, the last gap. A class's coarser levels are its number divided: the digits are in
mixed radix, the coarsest first.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass
from typing import NamedTuple

from worker.core.conversations import StopReason

TURNS = (2, 5, 17)
OUTPUT_TOKENS = (50, 150, 400, 1200)
APPENDED_TOKENS = (256, 2048)
GAP_MS = (1000, 4000, 16_000, 64_000)
"""Where the next group of each begins."""


class Children(enum.IntEnum):
    """What a conversation's children do: it has none; some are in flight; all ended before its own last turn did; some
    ended since, and one of them not with the end of its turn; some ended since, all of them so."""

    NONE = 0
    IN_FLIGHT = 1
    EARLIER = 2
    PENDING = 3
    DONE = 4


@dataclass(frozen=True, slots=True)
class Features:
    """Of an idle conversation. `turns`: its requests so far; `output_tokens`, `appended_tokens`: of its last answer,
    and by how much its last prompt was longer than the one before; `gap_ms`: how long it was away the last time, None:
    it has not come back yet."""

    final: bool = False
    stop: StopReason = StopReason.UNKNOWN
    is_child: bool = False
    turns: int = 1
    children: Children = Children.NONE
    output_tokens: int = 0
    appended_tokens: int = 0
    gap_ms: int | None = None


class Digit(NamedTuple):
    name: str
    values: tuple[str, ...]


def _groups(edges: tuple[int, ...]) -> tuple[str, ...]:
    bounds = (0, *edges)
    return (*(f"{low} to {high - 1}" for low, high in zip(bounds, edges, strict=False)), f"{edges[-1]} or more")


FINAL = Digit("final", ("no", "yes"))
KIND = Digit("kind", ("root", "child"))
STOP = Digit("stop reason", ("tool call", "end of turn", "length"))
CHILDREN = Digit("children", ("none", "in flight", "ended earlier", "ended, not all done", "ended, all done"))
TURN = Digit("turns", _groups((1, *TURNS))[1:])
OUTPUT = Digit("output tokens", _groups(OUTPUT_TOKENS))
APPENDED = Digit("appended tokens", _groups(APPENDED_TOKENS))
GAP = Digit("last gap, ms", ("none yet", *_groups(GAP_MS)))

KNOWN = (FINAL, STOP, KIND, CHILDREN, TURN, OUTPUT)
UNKNOWN = (FINAL, KIND, CHILDREN, TURN, OUTPUT, APPENDED, GAP)
"""The digits of a class whose stop reason is known, and of one whose is not."""


def _product(digits: tuple[Digit, ...]) -> int:
    product = 1
    for digit in digits:
        product *= len(digit.values)
    return product


NUM_KNOWN = _product(KNOWN)
NUM_CLASSES = NUM_KNOWN + _product(UNKNOWN)
EVERYBODY = NUM_CLASSES
"""Stands for all classes together: what is said of it holds for a class of which nothing is known."""


def class_of(features: Features) -> int:
    """In [0, NUM_CLASSES)."""
    turns = bisect.bisect_right(TURNS, features.turns)
    output = bisect.bisect_right(OUTPUT_TOKENS, features.output_tokens)
    if features.stop is not StopReason.UNKNOWN:
        given = (features.final, features.stop - 1, features.is_child, features.children, turns, output)
        return _number(KNOWN, given)
    appended = bisect.bisect_right(APPENDED_TOKENS, features.appended_tokens)
    gap = 0 if features.gap_ms is None else 1 + bisect.bisect_right(GAP_MS, features.gap_ms)
    given = (features.final, features.is_child, features.children, turns, output, appended, gap)
    return NUM_KNOWN + _number(UNKNOWN, given)


def _number(digits: tuple[Digit, ...], given: tuple[int, ...]) -> int:
    number = 0
    for digit, value in zip(digits, given, strict=True):
        number = number * len(digit.values) + value
    return number


def levels(number: int) -> tuple[int, ...]:
    """The class and the coarser groups that it is in, coarsest first, as numbers that no other group has.

    The coarsest has the first two digits: a mark alone says too little.
    """
    digits, base = (KNOWN, 0) if number < NUM_KNOWN else (UNKNOWN, NUM_KNOWN)
    rest = number - base
    found = []
    for level in range(len(digits), 1, -1):
        found.append((len(digits) - level) * 2 * NUM_CLASSES + base + rest)
        rest //= len(digits[level - 1].values)
    return tuple(found[::-1])


def described(number: int) -> dict[str, str]:
    """Each digit's name and value, for people."""
    if number == EVERYBODY:
        return {}
    digits, rest = (KNOWN, number) if number < NUM_KNOWN else (UNKNOWN, number - NUM_KNOWN)
    told: dict[str, str] = {}
    for digit in reversed(digits):
        rest, value = divmod(rest, len(digit.values))
        told[digit.name] = digit.values[value]
    return dict(reversed(told.items()))
