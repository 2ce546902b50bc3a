"""What is told of runs to those who follow the cache from outside."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from worker.core.events import KEY_BYTES, CacheEvent, Removed, Stored, Updated
from worker.core.runs import Run
from worker.core.stretches import Change
from worker.core.tiers import TIERS, Tier


def stored(run: Run, start: int, stop: int, tier: Tier) -> Stored:
    """Blocks [start, stop) of `run` are in `tier`."""
    block = len(run.tokens) // run.length
    return Stored(
        run.key_before(start),
        _keys(run, start, stop),
        tier,
        np.frombuffer(bytes(run.tokens[start * block : stop * block]), np.int32),
        not run.start + start,
    )


def removed(run: Run, start: int, stop: int, tier: Tier) -> Removed:
    """Blocks [start, stop) of `run` left `tier`."""
    return Removed(_keys(run, start, stop), tier)


def by_tier(run: Run, start: int, stop: int) -> list[tuple[int, int, Tier]]:
    """Blocks [start, stop) of `run` by the tier that they are in now."""
    parts: list[tuple[int, int, Tier]] = []
    at = start
    for tier, end in zip(TIERS, run.ends, strict=True):
        last = end if end < stop else stop
        if at < last:
            parts.append((at, last, tier))
            at = last
    return parts


def moved(run: Run, before: Iterable[tuple[int, int, Tier]]) -> list[CacheEvent]:
    """These blocks, each stretch from the tier that it was in, are together in another one."""
    told: list[CacheEvent] = []
    for start, stop, source in before:
        told += [removed(run, start, stop, source), stored(run, start, stop, run.tier_of(start))]
    return told


def updated(run: Run, changes: Iterable[Change]) -> list[CacheEvent]:
    """The priorities of these stretches changed; what else did is nobody's business."""
    return [
        Updated(run.key(one.start), run.key(one.stop - 1), one.stop - one.start, one.old.priority, one.new.priority)
        for one in changes
        if one.old.priority != one.new.priority
    ]


def snapshot(runs: Iterable[Run]) -> list[Stored]:
    """Everything that is there, parents first, as it would be told to who knows nothing."""
    return [
        stored(run, start, stop, tier)
        for run in sorted(runs, key=lambda run: (run.start, run.number))
        for start, stop, tier in by_tier(run, 0, run.length)
    ]


def _keys(run: Run, start: int, stop: int) -> bytes:
    return bytes(run.keys[KEY_BYTES * start : KEY_BYTES * stop])
