"""What rank 0 holds, as an operator asks for it: plain values, ready for JSON. Reads between steps, changes nothing."""

from __future__ import annotations

import itertools
from typing import Any

from worker.core.conversations import Conversation
from worker.core.demotion import Verdict, descendants, verdicts
from worker.core.events import KEY_BYTES
from worker.core.replica import Replica
from worker.core.returns.explained import explained
from worker.core.runs import Run
from worker.core.tiers import Tier

HELD = "a request holds it"
EXTENDED = "another conversation extends it"


def families(replica: Replica, *, family: str | None, limit: int) -> list[dict[str, Any]]:
    """Up to `limit` conversations: all, or `family` and its descendants, nearest first."""
    registry = replica.conversations
    if family is None:
        return [_conversation(replica, one) for one in itertools.islice(registry, limit)]
    root = registry.find(family)
    below = descendants(registry, family)[::-1]
    return [_conversation(replica, one) for one in ([root] if root is not None else []) + below][:limit]


def dry_run(replica: Replica, parent: str) -> dict[str, Any]:
    """What a return of `parent` would demote now, what stays, and why."""
    config = replica.config
    children = verdicts(replica.conversations, parent, replica.number + 1, config.finished_subagent_min_idle_iterations)
    return {
        "parent": parent,
        "enabled": config.finished_subagent_priority is not None,
        "priority": config.finished_subagent_priority,
        "children": [_child(replica, verdict) for verdict in children],
    }


def block(replica: Replica, key: bytes) -> dict[str, Any]:
    """Where the block with this key is, or why it is gone."""
    for run in replica.cache.tree.runs():
        if run.parent is None:
            continue
        at = run.keys.find(key)
        while at >= 0 and at % KEY_BYTES:
            at = run.keys.find(key, at + 1)
        if at >= 0:
            return _resident(run, at // KEY_BYTES)
    fate = replica.cache.pools.fates.of(key)
    if fate is None:
        return {"state": "unknown"}
    return {"state": "evicted", "reason": fate.reason, "plan": fate.plan, "priority": fate.priority}


def _resident(run: Run, index: int) -> dict[str, Any]:
    terms = next(terms for _, stop, terms in run.stretches.of_length(run.length) if index < stop)
    tier = run.tier_of(index)
    return {
        "state": "resident",
        "tier": tier.name.lower(),
        "priority": terms.priority,
        "owner": terms.owner or None,
        "demoted": terms.demoted,
        "held": index < run.held_length,
        "position": run.start + index,
    }


def _conversation(replica: Replica, one: Conversation) -> dict[str, Any]:
    blocks, priorities = dict.fromkeys((tier.name.lower() for tier in Tier), 0), []
    for run, start, stop, priority in _owned(replica, one.id):
        priorities.append(priority)
        for name, count in _by_tier(run, start, stop).items():
            blocks[name] += count
    last = one.last_context_step
    return {
        "conversation": one.id,
        "parent": one.parent,
        "state": _state(one),
        "blocks": blocks,
        "priority": [min(priorities), max(priorities)] if priorities else None,
        "idle_steps": None if last is None or one.is_in_flight else replica.number - last,
        **({"retention": explained(replica.index, one.id)} if replica.index is not None else {}),
    }


def _state(one: Conversation) -> str:
    if one.is_in_flight:
        return "running"
    if one.demoted:
        return "demoted"
    return "final" if one.final else "idle"


def _owned(replica: Replica, conversation: str) -> list[tuple[Run, int, int, int]]:
    """(run, start, stop, priority) of each stretch that it owns."""
    return [
        (run, start, stop, terms.priority)
        for run in replica.cache.tree.owners.of(conversation)
        for start, stop, terms in run.stretches.of_length(run.length)
        if terms.owner == conversation
    ]


def _by_tier(run: Run, start: int, stop: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tier in Tier:
        first, last = run.span(tier)
        count = min(stop, last) - max(start, first)
        if count > 0:
            counts[tier.name.lower()] = count
    return counts


def _child(replica: Replica, verdict: Verdict) -> dict[str, Any]:
    return {
        "conversation": verdict.child.id,
        "finished": verdict.unfinished is None,
        "why_not": None if verdict.unfinished is None else str(verdict.unfinished),
        "steps_left": verdict.steps_left,
        "group": [_demotion(replica, one) for one in verdict.group],
    }


def _demotion(replica: Replica, one: Conversation) -> dict[str, Any]:
    """Of one conversation that would be demoted with its child: which of its blocks would go, and which would not.

    `reused`: what lies in front of its first own block; it found that, so others own it.
    """
    retention, priority = replica.cache.retention, replica.config.finished_subagent_priority
    covered = [one.id, *(other.id for other in descendants(replica.conversations, one.id))]
    clear = {run.number: first for run, first in retention.clear_parts(dict.fromkeys(covered, retention.births))}
    owned = _owned(replica, one.id)
    goes: list[dict[str, Any]] = []
    stays: list[dict[str, Any]] = []
    for run, start, stop, own in owned:
        first = min(stop, max(start, clear.get(run.number, run.length)))
        held = min(first, max(start, run.held_length))
        for begin, end, why in ((start, held, HELD), (held, first, EXTENDED)):
            if begin < end:
                stays.append({**_stretch(run, begin, end), "priority": own, "why": why})
        if first < stop and (priority is None or own > priority):
            goes.append({**_stretch(run, first, stop), "priority": own})
    return {
        "conversation": one.id,
        "would_demote": _counted(goes),
        "stays": _counted(stays),
        "reused": _counted(_in_front_of(*min(owned, key=_position)[:2]) if owned else []),
    }


def _position(part: tuple[Run, int, int, int]) -> int:
    run, start, _, _ = part
    return run.start + start


def _in_front_of(run: Run, block: int) -> list[dict[str, Any]]:
    """The path to this block of `run`, from its beginning."""
    parts: list[dict[str, Any]] = []
    while run.parent is not None:
        for start, stop, terms in reversed(list(run.stretches.of_length(run.length))):
            if start < block:
                part = _stretch(run, start, min(stop, block))
                parts.append({**part, "owner": terms.owner or None, "priority": terms.priority})
        run = run.parent
        block = run.length
    return parts[::-1]


def _counted(stretches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"blocks": sum(part["blocks"] for part in stretches), "stretches": stretches}


def _stretch(run: Run, start: int, stop: int) -> dict[str, Any]:
    return {
        "position": run.start + start,
        "blocks": stop - start,
        "tiers": _by_tier(run, start, stop),
        "first_key": run.key(start).hex(),
        "last_key": run.key(stop - 1).hex(),
    }
