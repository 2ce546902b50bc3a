"""`kinroute replay-recording`: carries out what a worker recorded, here and now, and says whether it decides alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.core.journal import Decision
from worker.core.recording import Failure, RecordingError, Segment, Unfinished, read
from worker.core.replay import Replayed, replay
from worker.recording_ring import latest

REPRODUCED, DIFFERS, UNREADABLE = 0, 1, 2


class Unreadable(Exception):
    """Raised when there is nothing that can be replayed; the message names the file."""


@dataclass(frozen=True, slots=True)
class _Result:
    file: Path
    segment: Segment
    replayed: Replayed


def replay_recording(place: Path, *, check: bool, decisions: int, as_json: bool) -> int:
    """Replays a segment, or the last one in a folder, and prints what it did. 0: it was reproduced; 1: it was not;
    2: it cannot be read, which stderr says."""
    try:
        result = _replay(place, check=check, decisions=decisions)
    except Unreadable as error:
        sys.stderr.write(f"{error}\n")
        return UNREADABLE
    told = _told(result)
    sys.stdout.write(json.dumps(told, indent=2) + "\n" if as_json else "".join(f"{line}\n" for line in _lines(told)))
    return REPRODUCED if result.replayed.departure is None else DIFFERS


def _replay(place: Path, *, check: bool, decisions: int) -> _Result:
    try:
        candidates = latest(place) if place.is_dir() else [place]
    except OSError as error:
        raise Unreadable(f"{place} cannot be read: {error.strerror}.") from error
    if not candidates:
        raise Unreadable(f"There is no recording in {place}.")
    file, segment = _first_finished(candidates)
    try:
        return _Result(file, segment, replay(segment, check=check, keep=decisions))
    except RecordingError as error:
        raise Unreadable(f"{file} cannot be replayed: {error}.") from error


def _first_finished(candidates: Iterable[Path]) -> tuple[Path, Segment]:
    """Newest first: a worker that was ended as it began a segment left the one before."""
    why = ""
    for file in candidates:
        try:
            return file, read(file.read_bytes())
        except OSError as error:
            raise Unreadable(f"{file} cannot be read: {error.strerror}.") from error
        except Unfinished as error:
            why = why or f"{file} cannot be replayed: {error}."
        except RecordingError as error:
            raise Unreadable(f"{file} cannot be replayed: {error}.") from error
    raise Unreadable(why)


def _told(result: _Result) -> dict[str, Any]:
    """As JSON shows it."""
    header, replayed, segment = result.segment.header, result.replayed, result.segment
    stats, departure = replayed.stats, replayed.departure
    return {
        "file": str(result.file),
        "reproduced": departure is None,
        "worker": {
            "model": header.model,
            "role": header.role,
            "ranks": header.world_size,
            "rank": header.rank,
            "instance_id": header.instance_id,
            "release": header.release,
            "began_at": header.began_at,
        },
        "torn_at": segment.torn_at,
        "steps": replayed.steps,
        "recorded_steps": segment.num_steps,
        "first_plan": replayed.first_plan,
        "last_plan": replayed.last_plan,
        "plan_ms": replayed.plan_ms,
        "requests": replayed.requests,
        "resumed": replayed.resumed,
        "acts": dict(sorted(replayed.acts.items())),
        "decisions": dict(sorted(replayed.decisions.items())),
        "uncached_tokens": stats.uncached_tokens,
        "evicted_pages": dict(stats.evicted_pages),
        "moved_pages": {f"{a.name.lower()} to {b.name.lower()}": n for (a, b), n in sorted(stats.moved_pages.items())},
        "demoted_conversations": stats.demoted_conversations,
        "demoted_blocks": stats.demoted_blocks,
        "restored_conversations": stats.restored_conversations,
        "differs": None
        if departure is None
        else {"plan": departure.plan, "why": departure.why, "decisions": _portable(departure.decisions)},
        "failure": None if segment.failure is None else _failure(segment.failure),
        "last_decisions": _portable(replayed.last_decisions),
    }


def _failure(failure: Failure) -> dict[str, Any]:
    return {name: getattr(failure, name) for name in failure.__struct_fields__}


def _portable(decisions: Iterable[Decision]) -> list[tuple[object, ...]]:
    return [decision.portable() for decision in decisions]


def _lines(told: dict[str, Any]) -> Iterable[str]:
    worker = told["worker"]
    yield told["file"]
    yield (
        f"  recorded by rank {worker['rank']} of {worker['ranks']}, {worker['role']} worker of {worker['model']}, "
        f"instance {worker['instance_id']}, release {worker['release']}, from {worker['began_at']} on"
    )
    if told["torn_at"] is not None:
        yield f"  torn at offset {told['torn_at']}: its writer was ended there; what stands before it is replayed"
    yield from _summary(told)
    if told["reproduced"]:
        yield "reproduced: every digest is as recorded" if told["steps"] else "reproduced: there is no step in it"
    else:
        differs = told["differs"]
        yield f"DIFFERS in plan {differs['plan']}: {differs['why']}"
        yield from (f"  decided now: {_sentence(one)}" for one in differs["decisions"])
    if told["failure"] is not None:
        yield from _failed(told["failure"], told["first_plan"] + told["recorded_steps"] - 1)
    if told["last_decisions"]:
        yield f"the last {len(told['last_decisions'])} decisions:"
        yield from (f"  {_sentence(one)}" for one in told["last_decisions"])


def _summary(told: dict[str, Any]) -> Iterable[str]:
    evicted = {reason: count for reason, count in told["evicted_pages"].items() if count}
    yield (
        f"  {told['steps']} of {told['recorded_steps']} steps, plans {told['first_plan']} to {told['last_plan']}, "
        f"{told['plan_ms'] / 1000:.1f} s"
    )
    yield (
        f"  {told['requests']} requests admitted, {told['resumed']} resumed, {told['uncached_tokens']} prompt tokens "
        "computed"
    )
    yield f"  {sum(told['decisions'].values())} decisions: {_counts(told['decisions'])}"
    yield f"  {sum(evicted.values())} pages evicted: {_counts(evicted)}; moved: {_counts(told['moved_pages'])}"
    yield (
        f"  {told['demoted_conversations']} sub-agents demoted ({told['demoted_blocks']} blocks), "
        f"{told['restored_conversations']} restored"
    )


def _failed(failure: dict[str, Any], last_recorded: int) -> Iterable[str]:
    yield f"the group ended there: {failure['why']}"
    if failure["plan"] is not None and failure["plan"] > last_recorded:
        yield f"  plan {failure['plan']} is not in this recording"
    for who, decisions in (("rank 0", failure["ours"]), (f"rank {failure['rank']}", failure["theirs"])):
        yield from (f"  {who} decided: {_sentence(one)}" for one in decisions or ())


def _sentence(decision: Iterable[Any]) -> str:
    plan, act, subject, facts, pages = decision
    shown = f" ({', '.join(map(str, facts))})" if facts else ""
    return f"plan {plan}: {act} {subject}{shown}" + (f", pages {', '.join(map(str, pages))}" if pages else "")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
