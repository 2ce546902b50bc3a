"""A replica and its naive model, each as tables that name nothing but blocks, requests and numbers: to be compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from tests.worker.core.naive_cache import Block, Tokens
from tests.worker.core.naive_replica import NaiveConversation, NaiveReplica
from worker.core.conversations import Conversation
from worker.core.events import KEY_BYTES, CacheEvent, Cleared, Removed, Stored
from worker.core.replica import Replica
from worker.core.runs import Run
from worker.core.tiers import Tier

Table: TypeAlias = dict[Any, tuple[Any, ...]]
Path: TypeAlias = tuple[bytes, Tokens]


def check_alike(real: Replica, naive: NaiveReplica) -> None:
    """Raises where a table of one differs from the other's, with the rows that do."""
    theirs = _tables_of_naive(naive)
    for what, table in _tables_of(real).items():
        other = theirs[what]
        if table != other:
            keys = [key for key in table.keys() | other.keys() if table.get(key) != other.get(key)]
            differ = {key: (table.get(key), other.get(key)) for key in keys}
            raise AssertionError(f"{what} differ, real and naive: {differ}")


def _tables_of(real: Replica) -> dict[str, Table]:
    pools = real.cache.pools
    counts = {tier: pools.counts(tier) for tier in Tier}
    return {
        "blocks": dict(_real_blocks(real)),
        "pages": {tier: (len(pools.free[tier]), one.cached, one.moving) for tier, one in counts.items()},
        "requests": {
            int(key): (
                one.committed,
                one.pages.size - one.committed,
                one.spare.size,
                one.computed,
                one.loading,
                one.returns,
                one.length,
            )
            for key, one in real.sequences.items()
        },
        "copies": {
            number: (one.work.source, one.work.target, len(one.work.sources))
            for number, one in pools.copies.running.items()
        },
        "dropped": {reason: (count,) for reason, count in real.cache.stats.evicted_pages.items() if count},
        "conversations": {one.id: _conversation(one) for one in real.conversations},
    }


def _tables_of_naive(naive: NaiveReplica) -> dict[str, Table]:
    cache = naive.cache
    held = cache.held()
    return {
        "blocks": {block.path: _naive_block(block, block in held) for block in cache.blocks()},
        "pages": {tier: (cache.num_free(tier), cache.num_idle(tier), cache.num_leaving(tier)) for tier in Tier},
        "requests": {
            key: (
                naive.committed(key),
                cache.private[key] - one.spare,
                one.spare,
                one.computed,
                one.loading,
                one.returns,
                len(one.tokens),
            )
            for key, one in naive.requests.items()
        },
        "copies": {number: (one.source, one.target, len(one.blocks)) for number, one in cache.copies.items()},
        "dropped": {reason: (count,) for reason, count in cache.dropped.items()},
        "conversations": {name: _conversation(one) for name, one in naive.conversations.items()},
    }


def _real_blocks(real: Replica) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    block = real.config.tokens_per_block
    left: list[tuple[Run, bytes, Tokens]] = []
    for run in real.cache.tree.runs():
        if run.parent is None:
            left += [(child, run.scope, ()) for child in run.children.values()]
    while left:
        run, scope, before = left.pop()
        tokens = before + tuple(np.frombuffer(bytes(run.tokens), np.int32).tolist())
        held = run.held_length
        for start, stop, terms in run.stretches.of_length(run.length):
            for at in range(start, stop):
                stamp = None if at < held else run.stamp
                kept = (terms.owner, terms.priority, terms.duration_ms, terms.until_ms, terms.demoted)
                yield (scope, tokens[: len(before) + (at + 1) * block]), (run.tier_of(at), stamp, at == 0, *kept)
        left += [(child, scope, tokens) for child in run.children.values()]


def _naive_block(block: Block, is_held: bool) -> tuple[Any, ...]:
    kept = (block.owner, block.priority, block.duration_ms, block.until_ms, block.demoted)
    return (block.tier, None if is_held else block.stamp, block.begins_run, *kept)


def _conversation(one: Conversation | NaiveConversation) -> tuple[Any, ...]:
    retry = (one.last_turn, one.last_prompt)
    return (one.parent, one.legs, one.generating, one.last_context_step, one.demoted, *retry)


class Listener:
    """Somebody outside who knows the cache by its events alone."""

    def __init__(self) -> None:
        self._told: dict[bytes, Tier] = {}

    def hear(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, Stored | Removed):
                for at in range(0, len(event.keys), KEY_BYTES):
                    key = event.keys[at : at + KEY_BYTES]
                    if isinstance(event, Stored):
                        assert key not in self._told, "stored twice"
                        self._told[key] = event.tier
                    else:
                        assert self._told.pop(key) is event.tier, "removed from where it was not"
            elif isinstance(event, Cleared):
                self._told.clear()

    def check(self, real: Replica) -> None:
        """What was told is what there is."""
        runs = [run for run in real.cache.tree.runs() if run.parent is not None]
        there = {run.key(at): run.tier_of(at) for run in runs for at in range(run.length)}
        assert self._told == there, "events tell of other blocks than there are"
