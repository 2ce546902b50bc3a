"""One session's conversations at a moment of a replay, and where their blocks are."""

from __future__ import annotations

from collections.abc import Sequence

from kinroute.replay.plays import PlayedRequest
from kinroute.replay.results import Family, Member
from worker.core.replica import Replica
from worker.core.tiers import Tier


def family_to_watch(requests: Sequence[PlayedRequest], index: int) -> int:
    """The play with most conversations of those that have requests before and after place `index`; else the last one
    that began before it."""
    later = {request.play for request in requests[index:]}
    seen: dict[int, set[str]] = {}
    for request in requests[:index]:
        seen.setdefault(request.play, set()).add(request.conversation)
    alive = [play for play in seen if play in later]
    if not alive:
        return max(seen, default=0)
    return max(alive, key=lambda play: (len(seen[play]), -play))


def family_at(requests: Sequence[PlayedRequest], play: int, replica: Replica, now_s: float) -> Family:
    """`requests`: those that arrived so far."""
    first_asked: dict[str, int] = {}
    known: dict[str, PlayedRequest] = {}
    seen: set[int] = set()
    for request in requests:
        if request.play == play:
            known.setdefault(request.conversation, request)
            blocks = {first + at for first, count in request.prompt_blocks for at in range(count)} - seen
            seen |= blocks
            first_asked[request.conversation] = first_asked.get(request.conversation, 0) + len(blocks)
    members = [_member(request, first_asked[name], replica) for name, request in known.items()]
    return Family(play, now_s, tuple(members))


def _member(request: PlayedRequest, asked: int, replica: Replica) -> Member:
    blocks = [0] * len(Tier)
    for run in replica.cache.tree.owners.of(request.conversation):
        for start, stop, terms in run.stretches.of_length(run.length):
            if terms.owner == request.conversation:
                for tier in Tier:
                    first, last = run.span(tier)
                    blocks[tier] += max(0, min(stop, last) - max(start, first))
    return Member(
        conversation=request.conversation,
        parent=request.parent,
        kind=request.kind,
        state=_state(request.conversation, replica),
        device=blocks[Tier.DEVICE],
        host=blocks[Tier.HOST],
        disk=blocks[Tier.DISK],
        dropped=max(0, asked - sum(blocks)),
    )


def _state(conversation: str, replica: Replica) -> str:
    known = replica.conversations.find(conversation)
    if known is None:
        return "unknown"
    if known.is_in_flight:
        return "running"
    return "demoted" if known.demoted else "final" if known.final else "idle"
