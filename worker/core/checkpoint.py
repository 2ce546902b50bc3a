"""A replica between two plans as bytes, and back: what a recording begins with.

Blocks are kept by their keys, not by their tokens, so a restored replica carries out plans but finds no prompts: a plan
names the runs that it means. Prompts that are being computed are kept as far as no block of theirs is committed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from worker.core.arrays import Growing, Int32s
from worker.core.batches import ChunkOf
from worker.core.config import CacheConfig, RetentionPolicy
from worker.core.conversations import Conversation, StopReason
from worker.core.copies import Copy
from worker.core.events import stand_ins
from worker.core.replica import Replica
from worker.core.returns import saved as saved_index
from worker.core.returns.saved import SavedIndex
from worker.core.runs import Hold, Run
from worker.core.sequences import Sequence
from worker.core.stretches import Stretches, Terms
from worker.core.tiers import CopyWork, Tier
from worker.core.tree import RunTree
from worker.core.types import PageId, RequestKey


class _Run(msgspec.Struct, array_like=True):
    """`parent` 0: a root. `children`: in their order."""

    number: int
    parent: int
    start: int
    scope: bytes
    pages: bytes
    keys: bytes
    stretches: list[tuple[int, Terms]]
    stamp: tuple[int, int]
    ends: list[int]
    children: list[int]


class _Sequence(msgspec.Struct, array_like=True):
    """`plain`: the members of `Sequence` that are plain values, by name."""

    hold: tuple[int, int]
    tokens: bytes
    pages: bytes
    spare: bytes
    plain: dict[str, Any]


class _Copy(msgspec.Struct, array_like=True):
    number: int
    source: int
    target: int
    sources: bytes
    targets: bytes
    current: bytes
    hold: tuple[int, int] | None


class _Conversation(msgspec.Struct, array_like=True):
    id: str
    tenant: bytes
    parent: str | None
    legs: int
    generating: bool
    last_context_step: int | None
    stop_reason: int
    final: bool
    last_turn: str
    last_prompt: bytes
    demoted: bool


class _Checkpoint(msgspec.Struct, array_like=True):
    number: int
    digest: bytes
    made: int
    released: int
    runs: list[_Run]
    sequences: list[_Sequence]
    chunked: list[int]
    free: list[bytes]
    off: list[int]
    copies: list[_Copy]
    last_copy: int
    births: int
    now_ms: int
    has_timed: bool
    lapses: list[tuple[int, int]]
    conversations: list[_Conversation]
    children: list[tuple[str, list[str]]]
    tenants: list[tuple[bytes, list[str]]]
    tenant_sizes: list[tuple[int, list[bytes]]]
    last_child_step: int | None
    retention_policy: RetentionPolicy
    index: SavedIndex | None


PLAIN = (
    "key",
    "base",
    "commit_until",
    "computed",
    "committed",
    "conversation",
    "owner",
    "prefills",
    "returns",
    "loading",
    "copy_from",
    "pinned",
    "extends",
    "worth",
)


def save(replica: Replica) -> bytes:
    """Costs what is copied: some 40 bytes a block, and what its runs and conversations take."""
    cache, tree, registry = replica.cache, replica.cache.tree, replica.conversations
    copies = cache.pools.copies
    return msgspec.msgpack.encode(
        _Checkpoint(
            number=replica.number,
            digest=replica.digest,
            made=tree._made,
            released=tree._released,
            runs=[_run(run) for run in tree.runs()],
            sequences=[_sequence(sequence) for sequence in replica.sequences.values()],
            chunked=[chunk.sequence.key for chunk in replica._chunks],
            free=[free.view.tobytes() for free in cache.pools.free],
            off=sorted(cache.pools.off),
            copies=[
                _Copy(
                    number,
                    copy.work.source,
                    copy.work.target,
                    copy.work.sources.tobytes(),
                    copy.work.targets.tobytes(),
                    copies.fills(copy.work.target, copy.work.targets, number).tobytes(),
                    (copy.hold.run.number, copy.hold.length) if copy.hold is not None else None,
                )
                for number, copy in copies.running.items()
            ],
            last_copy=copies.number,
            births=cache.retention.births,
            now_ms=cache.retention._now_ms,
            has_timed=cache.retention.has_timed,
            lapses=cache.retention._lapses,
            conversations=[_conversation(one) for one in registry],
            children=[(parent, list(children)) for parent, children in registry._children.items()],
            tenants=[(tenant, list(mine)) for tenant, mine in registry._tenants.by_tenant.items()],
            tenant_sizes=[(size, list(tenants)) for size, tenants in registry._tenants._of_size.items()],
            last_child_step=registry.last_child_step,
            retention_policy=replica.retention_policy,
            index=saved_index.save(replica.index) if replica.index is not None else None,
        )
    )


def load(config: CacheConfig, checkpoint: bytes) -> Replica:
    """A replica that goes on as the saved one did. Raises msgspec.ValidationError or DecodeError."""
    saved = msgspec.msgpack.decode(checkpoint, type=_Checkpoint)
    replica = Replica(config)
    replica._number = saved.number
    replica._journal.digest = saved.digest
    cache = replica.cache
    cache.finds_by_key = True
    _load_tree(cache.tree, saved, config.tokens_per_block)
    holds = _Holds(cache.tree)
    for one in saved.sequences:
        sequence = _load_sequence(one, holds)
        replica.sequences[sequence.key] = sequence
    replica._chunks = [ChunkOf(replica.sequences[RequestKey(key)], 0, 0, False) for key in saved.chunked]
    pools = cache.pools
    for free, pages in zip(pools.free, saved.free, strict=True):
        free.restore(_ints(pages))
    pools.off = {Tier(tier) for tier in saved.off}
    pools.copies.restore(
        saved.last_copy,
        [
            (
                Copy(
                    CopyWork(one.number, Tier(one.source), Tier(one.target), _ints(one.sources), _ints(one.targets)),
                    holds.at(*one.hold) if one.hold is not None else None,
                ),
                np.frombuffer(one.current, np.bool_),
            )
            for one in saved.copies
        ],
    )
    retention = cache.retention
    retention._births, retention._now_ms, retention.has_timed = saved.births, saved.now_ms, saved.has_timed
    retention._lapses = saved.lapses
    _load_conversations(replica, saved)
    replica.retention_policy = saved.retention_policy
    if replica.index is not None and saved.index is not None:
        saved_index.restore(replica.index, saved.index, cache.tree, replica.conversations)
    cache.tree.enqueue_all()
    return replica


def _ints(data: bytes) -> Int32s:
    return np.frombuffer(data, np.int32).copy()


def _run(run: Run) -> _Run:
    return _Run(
        run.number,
        run.parent.number if run.parent is not None else 0,
        run.start,
        run.scope,
        run.pages.view.tobytes(),
        bytes(run.keys),
        [(start, terms) for start, _, terms in run.stretches.of_length(run.length)],
        run.stamp,
        run.ends,
        [child.number for child in run.children.values()],
    )


def _load_tree(tree: RunTree, saved: _Checkpoint, block: int) -> None:
    runs: dict[int, Run] = {}
    for one in saved.runs:
        stretches = Stretches(one.stretches[0][1])
        for start, terms in one.stretches[1:]:
            stretches.extend(start, terms)
        tokens = bytearray(stand_ins(one.keys, block).tobytes() if one.parent else b"")
        runs[one.number] = Run(
            one.number, None, one.start, tokens, Growing(_ints(one.pages)), bytearray(one.keys), stretches,
            one.stamp, one.ends, scope=one.scope,
        )  # fmt: skip
    for one in saved.runs:
        run = runs[one.number]
        run.parent = runs[one.parent] if one.parent else None
        run.children = {bytes(runs[child].tokens[: tree.block_bytes]): runs[child] for child in one.children}
    tree.restore(runs, saved.made, saved.number, saved.released)


class _Holds:
    def __init__(self, tree: RunTree) -> None:
        self._tree = tree

    def at(self, number: int, length: int) -> Hold:
        hold = Hold(self._tree.run(number), length)
        self._tree.attach(hold)
        return hold


def _sequence(sequence: Sequence) -> _Sequence:
    return _Sequence(
        (sequence.hold.run.number, sequence.hold.length),
        sequence.tokens.view.tobytes(),
        sequence.pages.view.tobytes(),
        sequence.spare.view.tobytes(),
        {name: getattr(sequence, name) for name in PLAIN},
    )


def _load_sequence(saved: _Sequence, holds: _Holds) -> Sequence:
    plain = dict(saved.plain)
    plain["key"] = RequestKey(plain["key"])
    plain["worth"] = tuple(tuple(one) for one in plain["worth"])
    if plain["copy_from"] is not None:
        plain["copy_from"] = PageId(plain["copy_from"])
    return Sequence(
        hold=holds.at(*saved.hold),
        tokens=Growing(_ints(saved.tokens)),
        pages=Growing(_ints(saved.pages)),
        spare=Growing(_ints(saved.spare)),
        **plain,
    )


def _conversation(one: Conversation) -> _Conversation:
    return _Conversation(
        one.id,
        one.tenant,
        one.parent,
        one.legs,
        one.generating,
        one.last_context_step,
        one.stop_reason,
        one.final,
        one.last_turn,
        one.last_prompt,
        one.demoted,
    )


def _load_conversations(replica: Replica, saved: _Checkpoint) -> None:
    registry = replica.conversations
    for one in saved.conversations:
        members = msgspec.structs.asdict(one) | {"stop_reason": StopReason(one.stop_reason)}
        registry._known[one.id] = Conversation(**members)
    registry.restore_children(dict(saved.children))
    registry._tenants.by_tenant = {
        tenant: {one: registry._known[one] for one in mine} for tenant, mine in saved.tenants
    }
    registry._tenants._of_size = {size: dict.fromkeys(tenants) for size, tenants in saved.tenant_sizes}
    registry.last_child_step = saved.last_child_step
