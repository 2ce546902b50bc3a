"""Carries out a recording again, and says whether it decides as it did."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import msgspec

from worker.core import checkpoint
from worker.core import plan as plans
from worker.core.journal import Decision
from worker.core.recording import RecordingError, Segment, Step
from worker.core.replica import Replica
from worker.core.stats import CacheStats


@dataclass(frozen=True, slots=True)
class Departure:
    """The first plan that did not do again what it did. `why`: in a sentence; `decisions`: what it decided now."""

    plan: int
    why: str
    decisions: tuple[Decision, ...]


@dataclass(slots=True)
class Replayed:
    """What the steps of one segment did.

    `requests`: admitted for the first time; `resumed`: admitted again. `decisions`: by act. `last_decisions`: the last
    so many that were asked for. `stats`: since the checkpoint. `departure` None: all of it was reproduced.
    """

    stats: CacheStats
    steps: int = 0
    first_plan: int = 0
    last_plan: int = 0
    plan_ms: int = 0
    requests: int = 0
    resumed: int = 0
    acts: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    last_decisions: deque[Decision] = field(default_factory=deque)
    departure: Departure | None = None


def replay(segment: Segment, *, check: bool = False, keep: int = 0) -> Replayed:
    """From the checkpoint to the end, or to the first plan that differs. `check`: every invariant, after every plan.

    `keep`: how many decisions to remember. Raises RecordingError where the segment does not hold together.
    """
    # Events leave a worker and decide nothing.
    config = replace(segment.header.config, tells_events=False)
    try:
        replica = checkpoint.load(config, bytes(segment.checkpoint))
    except (msgspec.MsgspecError, AssertionError, LookupError, TypeError, ValueError) as error:
        raise RecordingError(0, f"a checkpoint was due that can be loaded: {error!r}") from error
    replayed = Replayed(replica.cache.stats, last_decisions=deque(maxlen=keep))
    began_ms: int | None = None
    for step in segment.steps():
        if began_ms is None:
            began_ms = step.plan.time_ms
            replayed.first_plan = step.plan.number
        why = _apply(replica, step, check=check)
        decisions = [one for one in replica.decisions if one.plan == step.plan.number]
        replayed.decisions.update(one.act for one in decisions)
        replayed.last_decisions.extend(decisions)
        if why is not None:
            replayed.departure = Departure(step.plan.number, why, tuple(decisions))
            break
        replica.decisions.clear()
        _count(replayed, step)
        replayed.plan_ms = step.plan.time_ms - began_ms
    return replayed


def _apply(replica: Replica, step: Step, *, check: bool) -> str | None:
    """Why this step is not what was recorded, or None."""
    try:
        replica.apply(step.plan)
        if check:
            replica.check()
    except (AssertionError, LookupError, ValueError) as error:
        return f"it cannot be carried out: {error!r}"
    if replica.digest != step.digest:
        return f"its digest is {replica.digest.hex()}, and {step.digest.hex()} was recorded"
    return None


def _count(replayed: Replayed, step: Step) -> None:
    replayed.steps += 1
    replayed.last_plan = step.plan.number
    for act in step.plan.acts:
        replayed.acts[type(act).__name__.lower()] += 1
        if isinstance(act, plans.Admit):
            if act.resumed:
                replayed.resumed += 1
            else:
                replayed.requests += 1
