"""The return index as plain values, and back: its part of a checkpoint."""

from __future__ import annotations

import heapq

import msgspec

from worker.core.conversations import Conversations
from worker.core.returns.claims import Claim
from worker.core.returns.index import ReturnIndex
from worker.core.returns.tables import packed, unpacked
from worker.core.tree import RunTree


class SavedClaim(msgspec.Struct, array_like=True):
    """`conversation` None: of a request that named none. `runs`: by number."""

    number: int
    conversation: str | None
    runs: list[int]
    value: int
    group: int
    bucket: int
    in_flight: bool
    ended_ms: int
    since_ms: int
    counted_ms: int
    due_ms: int | None
    turns: int
    prompt_tokens: int
    output_tokens: int
    gap_ms: int | None
    parent: str | None


class SavedIndex(msgspec.Struct, array_like=True):
    now_ms: int
    made: int
    is_active: bool
    groups: tuple[int, ...]
    values: bytes
    claims: list[SavedClaim]


def save(index: ReturnIndex) -> SavedIndex:
    groups, values = packed(index.tables.rows)
    claims = [_saved(claim) for claim in index.all_claims()]
    return SavedIndex(index._now_ms, index._made, index.is_active, groups, values, claims)


def restore(index: ReturnIndex, saved: SavedIndex, tree: RunTree, registry: Conversations) -> None:
    """Make a fresh index what the saved one was; `tree` and `registry` are restored already."""
    index._now_ms, index._made, index.is_active = saved.now_ms, saved.made, saved.is_active
    index.tables = unpacked(saved.groups, saved.values)
    for one in saved.claims:
        known = registry[one.conversation] if one.conversation is not None else None
        claim = Claim(
            one.number, known, {number: tree.run(number) for number in one.runs}, one.value, one.group, one.bucket,
            one.in_flight, one.ended_ms, one.since_ms, one.counted_ms, one.due_ms, one.turns, one.prompt_tokens,
            one.output_tokens, one.gap_ms,
        )  # fmt: skip
        for run in claim.runs.values():
            run.claim, run.value = claim, claim.value
        if one.conversation is not None:
            index._claims[one.conversation] = claim
        index._broods.follow(claim, one.parent, in_flight=one.in_flight)
        if claim.due_ms is not None:
            heapq.heappush(index._due, (claim.due_ms, claim.number, claim))


def _saved(claim: Claim) -> SavedClaim:
    return SavedClaim(
        claim.number,
        claim.known.id if claim.known is not None else None,
        list(claim.runs),
        claim.value,
        claim.group,
        claim.bucket,
        claim.in_flight,
        claim.ended_ms,
        claim.since_ms,
        claim.counted_ms,
        claim.due_ms,
        claim.turns,
        claim.prompt_tokens,
        claim.output_tokens,
        claim.gap_ms,
        claim.parent,
    )
