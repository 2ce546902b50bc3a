"""The run tree: which committed blocks there are, and which pages hold them.

A conversation grows by runs, so a node is a *run*: a stretch of blocks that one path added, its tokens, pages and keys
contiguous arrays. Matching compares arrays; a fork splits a run at a block boundary; eviction cuts a run from its tail.
So match, commit and evict cost per run, not per block.

Children hang at the end of a run only. A *hold* is a run and a length: the path from the root to there stays. Blocks
that no hold covers are *idle*. Tiers get colder from the root down; in each, what is idle and has nothing as warm below
it is in that tier's eviction order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from enginelink.block_keys import BlockScope, scope_key
from worker.core import run_events
from worker.core.arrays import EMPTY, Growing, Int32s
from worker.core.events import KEY_BYTES, CacheEvent, Stored
from worker.core.holding import Holding
from worker.core.owners import Owners
from worker.core.paths import TOKEN_BYTES, below, descend, packed
from worker.core.runs import NOTHING, Hold, Match, Run, Segment
from worker.core.stretches import Change, Stretches, Terms
from worker.core.tiers import NUM_TIERS, Tier


class RunTree:
    """Runs under one root per scope (salt and adapter); scopes share nothing.

    `events` collects what changed until the owner takes it; None collects nothing. `on_split`: hears of each new lower
    part of a run.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.block_bytes = TOKEN_BYTES * tokens_per_block
        self._roots: dict[bytes, Run] = {}
        self._runs: dict[int, Run] = {}
        self._made = 0
        self.owners = Owners()
        self._plan = 0
        self._released = 0
        self._holding = Holding(self._runs)
        self.orders = self._holding.orders
        self.num_idle = self._holding.num_idle
        self.events: list[CacheEvent] | None = None
        self.on_split: Callable[[Run], None] = lambda lower: None
        self.num_blocks = 0

    def begin(self, plan: int) -> None:
        """Stamps of what is let go from here on carry this plan's number."""
        self._plan = plan
        self._released = 0

    def run(self, number: int) -> Run:
        return self._runs[number]

    def find_run(self, number: int) -> Run | None:
        return self._runs.get(number)

    def runs(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def root(self, scope: bytes) -> Run | None:
        return self._roots.get(scope)

    def match(self, scope: bytes, tokens: Int32s, max_blocks: int) -> Match:
        """The longest committed prefix of `tokens`, at most `max_blocks` blocks, in whatever tier. Changes nothing."""
        root = self._roots.get(scope)
        if root is None:
            return NOTHING
        return descend(root, 0, packed(tokens), max_blocks, self.block_bytes)

    # Holding.

    def hold(self, scope: bytes, match: Match) -> Hold:
        """Keep what `match` found in `scope`; it must be fresh."""
        hold = Hold(match.run or self._root(scope), match.length)
        self._holding.attach(hold)
        return hold

    def release(self, hold: Hold) -> None:
        """The path is let go: its runs take this moment's stamp, and what became idle joins the eviction order.

        A run that the path ends in the middle of is split: the rest of it was not used.
        """
        self._released += 1
        stamp = (self._plan, self._released)
        if 0 < hold.length < hold.run.length:
            self._split(hold.run, hold.length)
        ancestor: Run | None = hold.run if hold.length else hold.run.parent
        while ancestor is not None:
            ancestor.stamp = stamp
            ancestor = ancestor.parent
        self.detach(hold)

    def detach(self, hold: Hold) -> None:
        """Let go of the path as if it had not been used. A root that nothing needs is forgotten."""
        run = hold.run
        self._holding.detach(hold)
        if run.parent is None:
            self._drop_if_empty_root(run)

    def attach(self, hold: Hold) -> None:
        """Count a hold in that was made elsewhere."""
        self._holding.attach(hold)

    def move(self, hold: Hold, run: Run, length: int) -> None:
        """To another place of its path."""
        self._holding.move(hold, run, length)

    # Growing.

    def append(self, hold: Hold, tokens: bytes, keys: bytes, pages: Int32s, terms: Sequence[tuple[int, Terms]]) -> None:
        """New blocks behind `hold`, all of them on the device, and move it to their end.

        In place at a childless end, else in a run of their own. `terms`: how many of the blocks are kept how.
        """
        run = hold.run
        if hold.length < run.length:
            run = self._split(run, hold.length)
        above = run
        grows = run.parent is not None and not run.children
        first = run.pages.size if grows else 0
        if grows:
            run.tokens += tokens
            run.pages.extend(pages)
            run.keys += keys
            length = run.pages.size
            run.ends = [length] * NUM_TIERS
            hold.length = run.held_length = length
        else:
            run = self._make(
                run, bytearray(tokens), pages, bytearray(keys), Stretches(terms[0][1]), [len(pages)] * NUM_TIERS
            )
            self._link(run)
            run.holds, run.held_length = [hold], len(pages)
            above.holds.remove(hold)
            above.held_children += 1
            hold.run, hold.length = run, len(pages)
        at = first
        for count, kept in terms:
            if at:
                run.stretches.extend(at, kept)
            self.owners.add(kept.owner, run)
            at += count
        assert at == run.pages.size, "terms for more or fewer blocks than there are"
        self.num_blocks += len(pages)
        self._retop(run)
        if self.events is not None:
            begins = not (run.start + first)
            token_ids = np.frombuffer(tokens, np.int32)
            self.events.append(Stored(run.key_before(first), keys, Tier.DEVICE, token_ids, begins))

    def restore(self, runs: dict[int, Run], made: int, plan: int, released: int) -> None:
        """Begin with these runs, whose members say how they hang together; `enqueue_all` ends it."""
        self._runs.update(runs)
        self._roots = {run.scope: run for run in runs.values() if run.parent is None}
        self._made, self._plan, self._released = made, plan, released
        for run in sorted(runs.values(), key=lambda run: -run.start - run.length):
            self.num_blocks += run.length
            for tier in Tier:
                self.num_idle[tier] += run.idle(tier)
            run.first_tiers = [sum(child.first_tier is tier for child in run.children.values()) for tier in Tier]
            for child in run.children.values():
                _count(run.below, child.top, 1)
            run.newest = next(reversed(run.children.values()), None)
            run.top = self._top(run)
            self.owners.add_all(run)

    def enqueue_all(self) -> None:
        """After `restore` and the holds that belong to it."""
        for run in self._runs.values():
            self._holding.enqueue(run)

    def _split(self, run: Run, length: int) -> Run:
        """Cut `run` after `length` blocks; returns the upper part, which keeps number and parent."""
        cut = length * self.block_bytes
        ends = run.ends
        lower = self._make(
            run,
            run.tokens[cut:],
            run.pages.view[length:],
            run.keys[KEY_BYTES * length :],
            run.stretches.split(length),
            [max(0, end - length) for end in ends],
        )
        lower.start, lower.stamp = run.start + length, run.stamp
        lower.claim, lower.value = run.claim, run.value
        if run.claim is not None:
            run.claim.runs[lower.number] = lower
        lower.children, lower.held_children = run.children, run.held_children
        lower.newest, lower.below, lower.first_tiers = run.newest, run.below, run.first_tiers
        for child in lower.children.values():
            child.parent = lower
        lower.top = self._top(lower)
        if run.holds:
            lower.holds = [hold for hold in run.holds if hold.length > length]
            run.holds = [hold for hold in run.holds if hold.length <= length]
            for hold in lower.holds:
                hold.run = lower
                hold.length -= length
        if run.held_length > length:
            run.held_length, lower.held_length = length, run.held_length - length
        run.tokens = run.tokens[:cut]
        run.pages = Growing(run.pages.view[:length])
        del run.keys[KEY_BYTES * length :]
        run.ends = [min(end, length) for end in ends]
        run.children, run.newest = {bytes(lower.tokens[: self.block_bytes]): lower}, lower
        run.below = {lower.top: 1}
        run.first_tiers = [0] * NUM_TIERS
        run.first_tiers[lower.first_tier] = 1
        run.held_children = int(lower.is_held)
        self.owners.add_all(lower)
        self.owners.lost(run, lower.stretches.owners())
        self._holding.enqueue(run)
        self._holding.enqueue(lower)
        self.on_split(lower)
        return run

    def _make(
        self,
        parent: Run | None,
        tokens: bytearray,
        pages: Int32s,
        keys: bytearray,
        stretches: Stretches,
        ends: list[int],
    ) -> Run:
        self._made += 1
        stamp = (self._plan, self._released)
        start = parent.start + parent.length if parent is not None else 0
        run = Run(self._made, parent, start, tokens, Growing(pages), keys, stretches, stamp, ends)
        self._runs[run.number] = run
        return run

    def _link(self, run: Run) -> None:
        """A new run, all of it on the device, becomes a child of its parent."""
        parent = run.parent
        assert parent is not None
        run.top = run.stretches.top()
        parent.children[bytes(run.tokens[: self.block_bytes])] = parent.newest = run
        parent.first_tiers[0] += 1
        _count(parent.below, run.top, 1)
        self._retop(parent)

    def _root(self, scope: bytes) -> Run:
        root = self._roots.get(scope)
        if root is None:
            key = bytearray(scope_key(BlockScope(salt=scope)))
            root = self._make(None, bytearray(), EMPTY, key, Stretches(Terms()), [0] * NUM_TIERS)
            self._roots[scope] = root
            root.scope = scope
        return root

    # Changing what is there.

    def promote(self, segment: Segment, pages: Int32s) -> None:
        """These blocks, all of them in colder tiers and first of those in their run, are on the device in `pages`."""
        run = segment.run
        assert segment.start == run.ends[Tier.DEVICE], "loaded from the middle"
        before = self._by_tier(run, segment.start, segment.stop)
        run.pages.view[segment.start : segment.stop] = pages
        self._holding.retier(run, [max(end, segment.stop) for end in run.ends])
        self._tell_moves(run, before)

    def sink(self, run: Run, count: int, source: Tier, target: Tier, pages: Int32s) -> Int32s:
        """The last `count` blocks that `run` has in `source` are in `target` in `pages`; returns those they left."""
        stop = run.ends[source]
        before = self._by_tier(run, stop - count, stop)
        left = run.pages.view[stop - count : stop].copy()
        run.pages.view[stop - count : stop] = pages
        self._holding.retier(
            run, [min(end, stop - count) if source <= t < target else end for t, end in enumerate(run.ends)]
        )
        self._tell_moves(run, before)
        return left

    def _by_tier(self, run: Run, start: int, stop: int) -> list[tuple[int, int, Tier]]:
        """Where these blocks are before a move; empty where nobody listens."""
        return run_events.by_tier(run, start, stop) if self.events is not None else []

    def _tell_moves(self, run: Run, before: list[tuple[int, int, Tier]]) -> None:
        if self.events is not None:
            self.events += run_events.moved(run, before)

    def snapshot(self) -> list[Stored]:
        """Everything that is there, parents first, as it would be told to who knows nothing."""
        return run_events.snapshot(self._runs.values())

    def change(self, run: Run, start: int, changed: Callable[[Terms], Terms]) -> list[Change]:
        """New terms for the blocks of `run` from `start` on; returns what is different. Owners stay."""
        changes = run.stretches.change(start, run.length, changed)
        if not changes:
            return changes
        self._retop(run)
        if self.events is not None:
            self.events += run_events.updated(run, changes)
        return changes

    def cut(self, run: Run, index: int) -> list[tuple[Tier, Int32s]]:
        """Drop the blocks of `run` from `index` on and all that hangs below; nobody may hold any of it.

        Returns the pages that they had, by tier.
        """
        pages: list[tuple[Tier, Int32s]] = []
        for one in list(below(run)):
            pages += self._drop_from(one, 0)
            self._forget(one)
        run.children, run.newest, run.below, run.first_tiers = {}, None, {}, [0] * NUM_TIERS
        first_tier = run.first_tier
        pages += self._drop_from(run, index)
        parent = run.parent
        if index == 0 and parent is not None:
            del parent.children[bytes(run.tokens[: self.block_bytes])]
            if parent.newest is run:
                parent.newest = next(reversed(parent.children.values()), None)
            parent.first_tiers[first_tier] -= 1
            _count(parent.below, run.top, -1)
            self._forget(run)
            self._retop(parent)
            if parent.parent is None:
                self._drop_if_empty_root(parent)
            return pages
        owners = run.stretches.owners()
        run.pages.trim(index)
        del run.tokens[index * self.block_bytes :]
        del run.keys[KEY_BYTES * index :]
        if parent is not None:
            run.stretches.trim(index)
        run.ends = [min(end, index) for end in run.ends]
        self.owners.lost(run, owners)
        self._retop(run)
        return pages

    def _drop_from(self, run: Run, index: int) -> list[tuple[Tier, Int32s]]:
        """These blocks count no more; returns their pages."""
        assert run.held_length <= index, "blocks that somebody holds are dropped"
        parts: list[tuple[Tier, Int32s]] = []
        for start, stop, tier in run_events.by_tier(run, index, run.length):
            self.num_idle[tier] -= stop - start
            self.num_blocks -= stop - start
            parts.append((tier, run.pages.view[start:stop].copy()))
            if self.events is not None:
                self.events.append(run_events.removed(run, start, stop, tier))
        return parts

    def _forget(self, run: Run) -> None:
        assert not run.holds, "a run that somebody holds is dropped"
        del self._runs[run.number]
        self.owners.forget(run)
        if run.claim is not None:
            del run.claim.runs[run.number]
            run.claim = None

    def _drop_if_empty_root(self, run: Run) -> None:
        if not run.children and not run.holds and self._roots.get(run.scope) is run:
            del self._roots[run.scope]
            del self._runs[run.number]

    def enqueue(self, run: Run) -> None:
        """What it is worth has changed."""
        self._holding.enqueue(run)

    # Bookkeeping.

    @staticmethod
    def _top(run: Run) -> int:
        own = run.stretches.top() if run.parent is not None else -1
        return max(own, *run.below) if run.below else own

    def _retop(self, run: Run) -> None:
        """Priorities of `run` or right below it changed: bring its own place and its ancestors' up to date."""
        while True:
            self._holding.enqueue(run)
            parent = run.parent
            top = self._top(run)
            if top == run.top or parent is None:
                run.top = top
                return
            if run.top >= 0:
                _count(parent.below, run.top, -1)
                _count(parent.below, top, 1)
            run.top = top
            run = parent


def _count(counts: dict[int, int], what: int, by: int) -> None:
    number = counts.get(what, 0) + by
    if number:
        counts[what] = number
    else:
        del counts[what]
