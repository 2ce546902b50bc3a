"""What recorded sessions are like, in the numbers that synthetic ones are made of (`kinroute.replay.families`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kinroute.replay.traces import Session, TracedRequest


@dataclass(frozen=True, slots=True)
class Spread:
    """A heavy-tailed quantity: half of it is at most `median`, nine tenths at most `p90`."""

    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Measures:
    """Tokens of a prompt are whole blocks'. Gaps: from an answer's end to the conversation's next request.

    `edits`: turns whose prompt the next one does not extend, but keeps half of; `compactions`: keeps less.
    `shared_tokens`: what a sub-agent's first prompt has in common with an earlier conversation of its session.
    """

    sessions: int
    requests: int
    with_sub_agents: float
    root_turns: Spread
    first_prompt_tokens: Spread
    grown_tokens: Spread
    output_tokens: Spread
    token_s: Spread
    tool_gap_s: Spread
    end_gap_s: Spread
    end_stops: float
    edits: float
    compactions: float
    kept_at_compaction: float
    sub_agents: Spread
    sub_turns: Spread
    sub_first_tokens: Spread
    shared_tokens: Spread
    sub_resumed: float
    siblings_overlap: float
    sides_a_turn: float


def measure(sessions: Sequence[Session]) -> Measures:
    """Raises ValueError where there is nothing to measure."""
    kinds = [(session, _conversations(session)) for session in sessions]
    roots = [turns for _, all_ in kinds for turns in all_.values() if turns[0].kind == "root"]
    subs = [turns for _, all_ in kinds for turns in all_.values() if turns[0].kind == "sub"]
    if not roots:
        raise ValueError("no session has a root")
    tokens = sessions[0].block_tokens
    calls = [request for session in sessions for request in session.requests]
    steps = [(one, after) for turns in roots for one, after in itertools.pairwise(turns)]
    grown = [after.num_blocks - one.num_blocks for one, after in steps if one.is_extended_by(after)]
    kept = [_common(one, after) / one.num_blocks for one, after in steps if not one.is_extended_by(after)]
    gaps = [(one.stop, max(0.0, after.t_s - one.t_s - one.duration_s)) for one, after in steps]
    families = [[turns for turns in all_.values() if turns[0].kind == "sub"] for _, all_ in kinds]
    sides = sum(request.kind == "side" for request in calls)
    return Measures(
        sessions=len(sessions),
        requests=len(calls),
        with_sub_agents=_share(bool(family) for family in families),
        root_turns=_spread(len(turns) for turns in roots),
        first_prompt_tokens=_spread(turns[0].num_blocks * tokens for turns in roots),
        grown_tokens=_spread(blocks * tokens for blocks in grown),
        output_tokens=_spread(request.output_tokens for request in calls),
        token_s=_spread(request.duration_s / request.output_tokens for request in calls if request.output_tokens),
        tool_gap_s=_spread(gap for stop, gap in gaps if stop == "tool"),
        end_gap_s=_spread(gap for stop, gap in gaps if stop == "end"),
        end_stops=_share(stop == "end" for stop, _ in gaps if stop is not None),
        edits=sum(share >= 0.5 for share in kept) / max(1, len(steps)),
        compactions=sum(share < 0.5 for share in kept) / max(1, len(steps)),
        kept_at_compaction=_spread(share for share in kept if share < 0.5).median,
        sub_agents=_spread(len(family) for family in families if family),
        sub_turns=_spread(len(turns) for turns in subs),
        sub_first_tokens=_spread(turns[0].num_blocks * tokens for turns in subs),
        shared_tokens=_spread(blocks * tokens for session in sessions for blocks in _shared(session)),
        sub_resumed=_share(any(one.stop == "end" for one in turns[:-1]) for turns in subs),
        siblings_overlap=_share(_overlaps(turns, family) for family in families for turns in family),
        sides_a_turn=sides / max(1, sum(len(turns) for turns in roots)),
    )


def _conversations(session: Session) -> dict[str, list[TracedRequest]]:
    found: dict[str, list[TracedRequest]] = {}
    for request in session.requests:
        found.setdefault(request.conversation, []).append(request)
    return found


def _common(one: TracedRequest, other: TracedRequest) -> int:
    """Blocks with which both prompts begin."""
    low, high = 0, min(one.num_blocks, other.num_blocks)
    while low < high:
        middle = (low + high) // 2
        if one.block(middle) == other.block(middle):
            low = middle + 1
        else:
            high = middle
    return low


def _shared(session: Session) -> Iterable[int]:
    firsts: dict[str, TracedRequest] = {}
    for request in session.requests:
        if request.conversation not in firsts:
            if request.kind == "sub":
                yield max((_common(request, other) for other in firsts.values()), default=0)
            firsts[request.conversation] = request


def _overlaps(turns: Sequence[TracedRequest], family: Sequence[Sequence[TracedRequest]]) -> bool:
    """A sibling is alive when it begins."""
    began_s = turns[0].t_s
    return any(
        other is not turns and other[0].t_s <= began_s < other[-1].t_s + other[-1].duration_s for other in family
    )


def _spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, 0.0)
    return Spread(*(float(ordered[int(share * (len(ordered) - 1))]) for share in (0.5, 0.9)))


def _share(values: Iterable[bool]) -> float:
    told = list(values)
    return sum(told) / max(1, len(told))
