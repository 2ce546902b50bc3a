"""A cache that is driven commit by commit, without requests; its device pages are numbered as they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np

from worker.core.arrays import Growing, Int32s
from worker.core.cache import KvCache
from worker.core.config import CacheConfig, ReusePolicy
from worker.core.journal import Journal
from worker.core.paths import match_within, path_pages, segments
from worker.core.runs import Hold, PartMatch
from worker.core.sequences import Sequence, Worth
from worker.core.tiers import Tier
from worker.core.tree_check import check_tree
from worker.core.types import RequestKey

BLOCK = 2
SCOPE = b"tenant"


def ids(*tokens: int) -> Int32s:
    return np.array(tokens, np.int32)


class Tree:
    """Blocks of two tokens. Pages that `evict` frees are not used again, so that a number names one commit."""

    def __init__(self, num_pages: int = 1000, **members: Any) -> None:
        config = CacheConfig(num_pages, BLOCK, policy=ReusePolicy.PER_CONVERSATION, **members)
        self.cache = KvCache(config, Journal())
        self.tree = self.cache.tree
        self.pages = 0
        self.plan = 0
        self.begin()

    def begin(self, now_ms: int = 0) -> None:
        self.plan += 1
        self.cache.begin(self.plan, now_ms)

    def hold(self, *tokens: int, scope: bytes = SCOPE) -> Hold:
        """What is committed of `tokens`."""
        return self.tree.hold(scope, self.tree.match(scope, ids(*tokens), len(tokens) // BLOCK))

    def commit(self, *tokens: int, owner: str = "", scope: bytes = SCOPE, worth: tuple[Worth, ...] = ()) -> Hold:
        """All of `tokens` behind what is committed of them, held."""
        hold = self.hold(*tokens, scope=scope)
        rest = tokens[hold.blocks * BLOCK : len(tokens) // BLOCK * BLOCK]
        self.extend(hold, *rest, owner=owner, worth=worth)
        return hold

    def extend(
        self, hold: Hold, *tokens: int, owner: str = "", worth: tuple[Worth, ...] = ()
    ) -> tuple[list[int], list[int]]:
        """Pages that hold these blocks behind `hold` now, and those that are not needed for them."""
        count = len(tokens) // BLOCK
        if not count:
            return [], []
        taken = self.cache.take(count)
        assert taken is not None
        self.pages += count
        first = hold.blocks
        sequence = Sequence(
            key=RequestKey(0),
            hold=hold,
            base=first * BLOCK,
            tokens=Growing(ids(*tokens)),
            pages=Growing(np.concatenate([path_pages(hold), taken])),
            commit_until=1 << 30,
            computed=(first + count) * BLOCK,
            committed=first,
            owner=owner,
            worth=worth,
        )
        unused = self.cache.commit(sequence)
        check_tree(self.tree)
        return sequence.pages.view[first:].tolist(), unused.tolist()

    def let_go(self, *holds: Hold) -> None:
        for hold in holds:
            self.tree.release(hold)
            for segment in segments(hold.run, hold.length):
                self.cache.retention.let_go(segment.run)
        check_tree(self.tree)

    def cached(self, *tokens: int, scope: bytes = SCOPE) -> int:
        """Blocks of `tokens` that are committed."""
        return self.tree.match(scope, ids(*tokens), len(tokens) // BLOCK).blocks

    def part_match(self, *tokens: int, unless: int = -1) -> PartMatch | None:
        """The block that begins as `tokens`, at the beginning of a prompt; none in page `unless`."""
        root = self.tree.match(SCOPE, ids(*tokens), 0)
        return match_within(root, ids(*tokens), self.tree.block_bytes, lambda page: page != unless)

    def evict(self, count: int) -> list[int]:
        """Pages of the device that become free, in the order in which their blocks leave, dropped or moved."""
        free = self.cache.pools.free[Tier.DEVICE]
        pages: list[int] = []
        for _ in range(count):
            if not self.tree.num_idle[Tier.DEVICE]:
                break
            before = set(free.view.tolist())
            rest = free.take(len(free))
            taken = self.cache.take(1)
            assert taken is not None
            assert not before & set(taken.tolist())
            pages += taken.tolist()
            free.give(rest)
            check_tree(self.tree)
        return pages

    @property
    def num_runs(self) -> int:
        return sum(run.parent is not None for run in self.tree.runs())
