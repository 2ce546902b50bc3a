"""A stopwatch for a request's parts, in CPU time of its thread, and what many requests say together."""

from __future__ import annotations

import enum
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

Int32s: TypeAlias = npt.NDArray[np.int32]
Figures: TypeAlias = dict[str, float]


class Part(enum.IntEnum):
    """MATCH: what of the prompt is cached, keys included. RESERVE: hold it and take pages. COMMIT: what was computed
    becomes visible. RELEASE: the end. PLAN: opening and closing plans: digest, events, room for the next one.
    ONBOARD: waiting for what lay in colder tiers. COLLECT: garbage collections that fell into it."""

    MATCH = 0
    RESERVE = 1
    COMMIT = 2
    RELEASE = 3
    PLAN = 4
    ONBOARD = 5
    COLLECT = 6


@dataclass(frozen=True, slots=True)
class Turn:
    """One request as it comes to a manager. `answer`: the tokens that will be generated."""

    prompt: Int32s
    conversation: str
    parent: str | None = None
    answer: Int32s = field(default_factory=lambda: np.empty(0, np.int32))


class _Collections:
    """How long garbage was collected, in all."""

    def __init__(self) -> None:
        self.ns = 0
        self._began = 0
        gc.callbacks.append(self._hear)

    def _hear(self, phase: str, info: object) -> None:
        if phase == "start":
            self._began = time.thread_time_ns()
        else:
            self.ns += time.thread_time_ns() - self._began


_collections = _Collections()


class Laps:
    """CPU time of one request: `start`, then `lap` at the end of each part, as often as it comes.

    `own_ns`: what a lap itself costs; it is counted in none.
    """

    __slots__ = ("_at", "_collected", "ns")
    own_ns: ClassVar[int] = 0

    def __init__(self) -> None:
        self.ns = [0] * len(Part)
        self._at = self._collected = 0

    def start(self) -> None:
        """What was done since the last lap belongs to no part."""
        self._collected = _collections.ns
        self._at = time.thread_time_ns()

    def lap(self, part: Part) -> None:
        self.ns[part] += self._since()

    def take_off(self, part: Part) -> None:
        """What was done since the last lap had been counted for `part` and is none of it."""
        self.ns[part] -= self._since()

    def _since(self) -> int:
        now = time.thread_time_ns()
        collected = _collections.ns - self._collected
        self.ns[Part.COLLECT] += collected
        since = now - self._at - self.own_ns - collected
        self._at = now
        self._collected += collected
        return since

    @classmethod
    def calibrate(cls) -> None:
        cls.own_ns = 0
        costs: list[int] = []
        for _ in range(200):
            laps = cls()
            laps.start()
            for _ in range(20):
                laps.lap(Part.PLAN)
            costs.append(laps.total_ns // 20)
        cls.own_ns = int(statistics.median(costs))

    @property
    def total_ns(self) -> int:
        return sum(self.ns)


def medians_us(laps: Sequence[Laps]) -> Figures:
    """Of each part, by its name; of collections the mean, as most requests meet none."""
    medians = {part.name.lower(): us(statistics.median(one.ns[part] for one in laps)) for part in Part}
    return {**medians, Part.COLLECT.name.lower(): us(statistics.fmean(one.ns[Part.COLLECT] for one in laps))}


def spread_us(laps: Sequence[Laps]) -> Figures:
    totals = sorted(one.total_ns for one in laps)
    return {
        "mean": us(statistics.fmean(totals)),
        "median": us(statistics.median(totals)),
        "p10": us(totals[len(totals) // 10]),
        "p90": us(totals[len(totals) * 9 // 10]),
        "p99": us(totals[len(totals) * 99 // 100]),
    }


Laps.calibrate()


def us(ns: float) -> float:
    return round(ns / 1000, 2)
