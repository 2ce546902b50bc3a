"""A cache without pages: what would be cached if blocks were kept another way.

It has the run tree and the eviction order of the real one, on one tier as large as all of that one's, and sees the same
requests. What a request computes counts as there from its admission on, as whoever wants the same waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.core.arrays import Int32s
from worker.core.events import KEY_BYTES
from worker.core.paths import TOKEN_BYTES, descend, packed
from worker.core.returns.index import ReturnIndex
from worker.core.runs import Hold
from worker.core.sequences import Sequence
from worker.core.tiers import Tier
from worker.core.tree import RunTree


@dataclass(frozen=True, slots=True)
class _Held:
    hold: Hold
    sequence: Sequence


class GhostCache:
    """`indexed`: kept by the return index, without any demotion; else by `lru`.

    `room` is how many blocks there may be: what requests have in pages of their own takes from it.
    """

    def __init__(self, tokens_per_block: int, *, indexed: bool) -> None:
        self._block = tokens_per_block
        self._tree = RunTree(tokens_per_block)
        self._held: dict[int, _Held] = {}
        self.index = ReturnIndex(self._tree) if indexed else None

    def begin(self, plan: int) -> None:
        self._tree.begin(plan)

    @property
    def num_blocks(self) -> int:
        return self._tree.num_blocks

    def admit(self, sequence: Sequence, scope: bytes, tokens: Int32s, *, bypass: bool, room: int) -> int:
        """A request with the prompt `tokens` begins; returns how many blocks of it would have been found."""
        match = self._tree.match(scope, tokens, 0 if bypass else len(tokens) // self._block)
        held = self._held[sequence.key] = _Held(self._tree.hold(scope, match), sequence)
        self._grow(held, tokens, room)
        return min(match.blocks, (len(tokens) - 1) // self._block)

    def let_go(self, key: int, tokens: Int32s, room: int) -> None:
        """It is over; `tokens` are those computed. Nothing where it began before this cache did."""
        held = self._held.pop(key, None)
        if held is None:
            return
        self._grow(held, tokens, room)
        self._tree.release(held.hold)
        if self.index is not None:
            self.index.let_go(held.hold, held.sequence.conversation, len(tokens))

    def _grow(self, held: _Held, tokens: Int32s, room: int) -> None:
        """All full blocks of `tokens` that may be committed are there, as far as there is room."""
        hold, sequence = held.hold, held.sequence
        first, full = hold.blocks, min(len(tokens), sequence.commit_until) // self._block
        if full <= first:
            return
        rest = packed(tokens[first * self._block : full * self._block])
        found = descend(hold.run, hold.length, rest, full - first, self._tree.block_bytes)
        if found.blocks and found.run is not None:
            self._tree.move(hold, found.run, found.length)
        first += found.blocks
        while self._tree.num_blocks + full - first > room:
            run = self._tree.orders[Tier.DEVICE].first()
            if run is None:
                break
            self._tree.cut(run, max(run.held_length, run.length - (self._tree.num_blocks + full - first - room)))
        full = min(full, first + max(0, room - self._tree.num_blocks))
        if first < full:
            added = rest[found.blocks * self._tree.block_bytes :][: (full - first) * self._tree.block_bytes]
            assert len(added) == (full - first) * self._block * TOKEN_BYTES, "fewer tokens than blocks"
            keys, pages = bytes(KEY_BYTES * (full - first)), np.zeros(full - first, np.int32)
            self._tree.append(hold, added, keys, pages, sequence.terms(first, full, 0))
