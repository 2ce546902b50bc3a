"""Classes of conversations: what is known of one when its turn is over, from coarse to fine, as one number.

Where the last answer's stop reason is known it tells most; where it is not, the last gap has to do. A class is a number
in mixed radix, its coarsest digit first, so a coarser group is the number divided.
"""

from __future__ import annotations

import bisect
import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from worker.core.conversations import StopReason

TURNS = (2, 5, 17)
OUTPUT_TOKENS = (150, 400)
GAP_MS = (3000, 12_000)
"""Where the next group of each begins."""


class Children(enum.IntEnum):
    """What a conversation's children do: it has none; some are in flight; none is any more."""

    NONE = 0
    IN_FLIGHT = 1
    ENDED = 2


@dataclass(frozen=True, slots=True)
class Features:
    """Of an idle conversation. `turns`: its requests so far; `output_tokens`: of its last answer; `gap_ms`: how long it
    was away the last time, None: it has not come back yet."""

    final: bool = False
    stop: StopReason = StopReason.UNKNOWN
    is_child: bool = False
    turns: int = 1
    children: Children = Children.NONE
    output_tokens: int = 0
    gap_ms: int | None = None


class Digit(NamedTuple):
    name: str
    values: tuple[str, ...]


def _groups(edges: tuple[int, ...], first: int = 0) -> tuple[str, ...]:
    bounds = (first, *edges)
    return (*(f"{low} to {high - 1}" for low, high in zip(bounds, edges, strict=False)), f"{edges[-1]} or more")


FINAL = Digit("final", ("no", "yes"))
KIND = Digit("kind", ("root", "child"))
STOP = Digit("stop_reason", ("tool_call", "end_of_turn", "length"))
TURN = Digit("turns", _groups(TURNS, 1))
CHILDREN = Digit("children", ("none", "in flight", "ended"))
GAP = Digit("last_gap_ms", ("none yet", *_groups(GAP_MS)))
OUTPUT = Digit("output_tokens", _groups(OUTPUT_TOKENS))

KNOWN = (FINAL, STOP, KIND, TURN, CHILDREN, OUTPUT)
UNKNOWN = (FINAL, KIND, TURN, CHILDREN, GAP, OUTPUT)
"""The digits of a class whose stop reason is known, and of one whose is not."""
NUM_KNOWN = math.prod(len(digit.values) for digit in KNOWN)
NUM_CLASSES = NUM_KNOWN + math.prod(len(digit.values) for digit in UNKNOWN)
EVERYBODY = NUM_CLASSES
"""Stands for all classes together: what is said of it holds for a class of which nothing is known."""


def class_of(features: Features) -> int:
    """In [0, NUM_CLASSES)."""
    turns = bisect.bisect_right(TURNS, features.turns)
    output = bisect.bisect_right(OUTPUT_TOKENS, features.output_tokens)
    if features.stop is not StopReason.UNKNOWN:
        stop = features.stop - 1
        return _number(KNOWN, features.final, stop, features.is_child, turns, features.children, output)
    gap = 0 if features.gap_ms is None else 1 + bisect.bisect_right(GAP_MS, features.gap_ms)
    given = features.final, features.is_child, turns, features.children, gap, output
    return NUM_KNOWN + _number(UNKNOWN, *given)


def _number(digits: tuple[Digit, ...], *given: int) -> int:
    number = 0
    for digit, value in zip(digits, given, strict=True):
        number = number * len(digit.values) + value
    return number


def levels(number: int) -> tuple[int, ...]:
    """The groups that the class is in, coarsest first and itself last, as numbers that no other group has.

    The coarsest has the first two digits: a mark alone says too little.
    """
    digits, base = (KNOWN, 0) if number < NUM_KNOWN else (UNKNOWN, NUM_KNOWN)
    rest = number - base
    found: list[int] = []
    for level in range(len(digits), 1, -1):
        found.append((len(digits) - level) * NUM_CLASSES + base + rest)
        rest //= len(digits[level - 1].values)
    return tuple(found[::-1])


def described(number: int) -> dict[str, str]:
    """Each digit's name and value, for people; nothing for EVERYBODY."""
    if number == EVERYBODY:
        return {}
    digits, rest = (KNOWN, number) if number < NUM_KNOWN else (UNKNOWN, number - NUM_KNOWN)
    told: dict[str, str] = {}
    for digit in reversed(digits):
        rest, value = divmod(rest, len(digit.values))
        told[digit.name] = digit.values[value]
    return dict(reversed(told.items()))
