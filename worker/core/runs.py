"""The run tree: which committed blocks there are, and which pages hold them.

A conversation grows by runs, so a node is a *run*: a stretch of blocks that one path added, its tokens and pages
contiguous arrays. Matching compares arrays; a fork splits a run at a block boundary; eviction trims a run from its
tail. So match, commit and evict cost per run, not per block.

Children hang at the end of a run only, so a run with children is never trimmed. A *hold* is a run and a length: the
path from the root to there stays. The blocks that no hold covers are *idle*; they leave in the order in which their
runs were last let go, leaves first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from worker.core.arrays import Growing, Int32s

EMPTY = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Run:
    """`length` blocks below `parent`. A root has length 0 and no parent.

    `held_below`: holds in the subtrees of its children. `stamp`: when a path through it was last let go.
    `number`: in the order of making, the same on every rank; ties in eviction go by it.
    """

    number: int
    parent: Run | None
    tokens: Growing
    pages: Growing
    children: dict[bytes, Run] = field(default_factory=dict)
    holds: list[Hold] = field(default_factory=list)
    held_below: int = 0
    idle: int = 0
    stamp: tuple[int, int] = (0, 0)
    scope: bytes = b""

    @property
    def length(self) -> int:
        return self.pages.size

    @property
    def longest_hold(self) -> int:
        return max((hold.length for hold in self.holds), default=0)


@dataclass(slots=True, eq=False)
class Hold:
    """Keeps the path from the root to the first `length` blocks of `run`."""

    run: Run
    length: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest committed prefix: it ends after `length` blocks of `run`, `blocks` blocks from where it began.

    `run` None: the scope has no root yet.
    """

    run: Run | None
    length: int
    blocks: int


NOTHING = Match(None, 0, 0)


class RunTree:
    """Runs under one root per scope (salt and adapter); scopes share nothing."""

    def __init__(self, tokens_per_block: int) -> None:
        self._block = tokens_per_block
        self._roots: dict[bytes, Run] = {}
        self._runs: dict[int, Run] = {}
        self._made = 0
        self._queue: list[tuple[tuple[int, int], int]] = []
        self._plan = 0
        self._released = 0
        self.num_idle = 0
        """Blocks that could be evicted now."""
        self.num_blocks = 0

    def begin(self, plan: int) -> None:
        """Stamps of what is let go from here on carry this plan's number."""
        self._plan = plan
        self._released = 0

    def run(self, number: int) -> Run:
        return self._runs[number]

    def match(self, scope: bytes, tokens: Int32s, max_blocks: int) -> Match:
        """The longest committed prefix of `tokens`, at most `max_blocks` blocks. Changes nothing."""
        root = self._roots.get(scope)
        if root is None:
            return NOTHING
        return self._descend(root, 0, tokens[: max_blocks * self._block])

    def _descend(self, run: Run, length: int, tokens: Int32s) -> Match:
        """From after `length` blocks of `run` along `tokens`, by whole blocks."""
        block = self._block
        blocks = len(tokens) // block
        done = 0
        while True:
            fit = min(run.length - length, blocks - done)
            same = _equal_blocks(run.tokens.view[length * block :], tokens[done * block :], fit, block)
            length += same
            done += same
            if length < run.length or done == blocks:
                return Match(run, length, done)
            child = run.children.get(tokens[done * block : (done + 1) * block].tobytes())
            if child is None:
                return Match(run, length, done)
            run, length = child, 0

    def hold(self, scope: bytes, match: Match) -> Hold:
        """Keep what `match` found in `scope`; it must be fresh."""
        run = match.run or self._root(scope)
        hold = Hold(run, match.length)
        run.holds.append(hold)
        self._count_held(run, +1)
        return hold

    def release(self, hold: Hold) -> None:
        """The path is let go: its runs take this moment's stamp, and what became idle joins the eviction queue."""
        self._released += 1
        stamp = (self._plan, self._released)
        hold.run.holds.remove(hold)
        ancestor: Run | None = hold.run
        while ancestor is not None:
            ancestor.stamp = stamp
            ancestor = ancestor.parent
        self._count_held(hold.run, -1)

    def path_pages(self, hold: Hold) -> Int32s:
        """Pages of the held path, from the root."""
        parts = [hold.run.pages.view[: hold.length]]
        ancestor = hold.run.parent
        while ancestor is not None:
            parts.append(ancestor.pages.view)
            ancestor = ancestor.parent
        return np.concatenate(parts[::-1])

    def commit(self, hold: Hold, tokens: Int32s, pages: Int32s) -> tuple[Int32s, Int32s]:
        """Add the blocks `tokens` in `pages` behind `hold`, and move the hold to their end.

        What somebody else committed meanwhile is kept instead of ours. Returns the pages that hold these blocks now,
        and those of `pages` that are free again.
        """
        found = self._descend(hold.run, hold.length, tokens)
        kept = pages.copy()
        self._pages_between(hold, found, kept)
        free = pages[: found.blocks].copy()
        self._count_held(hold.run, -1)
        hold.run.holds.remove(hold)
        assert found.run is not None
        run, length = found.run, found.length
        if found.blocks < len(pages):
            run, length = self._append(run, length, tokens[found.blocks * self._block :], pages[found.blocks :])
        hold.run, hold.length = run, length
        run.holds.append(hold)
        self._count_held(run, +1)
        return kept, free

    def _pages_between(self, hold: Hold, found: Match, into: Int32s) -> None:
        """Write the pages of the `found.blocks` blocks behind `hold` to the front of `into`."""
        stop, run, length = found.blocks, found.run, found.length
        while stop > 0:
            assert run is not None, "a match that did not start at its hold"
            first = hold.length if run is hold.run else 0
            part = run.pages.view[first:length]
            into[stop - len(part) : stop] = part
            stop -= len(part)
            run = run.parent
            length = run.length if run is not None else 0

    def _append(self, run: Run, length: int, tokens: Int32s, pages: Int32s) -> tuple[Run, int]:
        """New blocks after `length` blocks of `run`: in place at a childless end, else in a run of their own."""
        if length < run.length:
            run = self._split(run, length)
        if run.parent is None or run.children:
            child = self._make(run, tokens, pages)
            run.children[tokens[: self._block].tobytes()] = child
            run = child
        else:
            run.tokens.extend(tokens)
            run.pages.extend(pages)
        self.num_blocks += len(pages)
        self._recount(run)
        return run, run.length

    def _split(self, run: Run, length: int) -> Run:
        """Cut `run` after `length` blocks; returns the new upper part. The lower part keeps its number and children."""
        assert run.parent is not None
        block = self._block
        key = run.tokens.view[:block].tobytes()
        upper = self._make(run.parent, run.tokens.view[: length * block], run.pages.view[:length])
        upper.stamp = run.stamp
        run.parent.children[key] = upper
        run.tokens = Growing(run.tokens.view[length * block :])
        run.pages = Growing(run.pages.view[length:])
        run.parent = upper
        upper.children[run.tokens.view[:block].tobytes()] = run
        for hold in run.holds:
            if hold.length <= length:
                hold.run = upper
                upper.holds.append(hold)
            else:
                hold.length -= length
        run.holds = [hold for hold in run.holds if hold.run is run]
        upper.held_below = run.held_below + len(run.holds)
        self._recount(run)
        self._recount(upper)
        return upper

    def evict(self, count: int) -> Int32s:
        """Drop up to `count` idle blocks, least recently let go first, from the tail of leaves; returns their pages."""
        pages: list[Int32s] = []
        left = count
        while left and self._queue:
            stamp, number = self._queue[0]
            run = self._runs.get(number)
            if run is None or run.stamp != stamp or run.children or not run.idle:
                heapq.heappop(self._queue)
                continue
            cut = min(left, run.idle)
            pages.append(self._trim(run, cut)[::-1])
            left -= cut
        return np.concatenate(pages) if pages else EMPTY

    def _trim(self, run: Run, count: int) -> Int32s:
        keep = run.length - count
        first = run.tokens.view[: self._block].tobytes()
        cut = run.pages.trim(keep)
        run.tokens.trim(keep * self._block)
        self.num_blocks -= count
        self._recount(run)
        if keep == 0 and not run.holds:
            parent = run.parent
            assert parent is not None
            del parent.children[first]
            del self._runs[run.number]
            self._drop_if_empty_root(parent)
            self._enqueue(parent)
        return cut

    def _drop_if_empty_root(self, run: Run) -> None:
        if run.parent is None and not run.children and not run.holds:
            del self._roots[run.scope]
            del self._runs[run.number]

    def _root(self, scope: bytes) -> Run:
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = self._make(None, EMPTY, EMPTY)
            root.scope = scope
        return root

    def _make(self, parent: Run | None, tokens: Int32s, pages: Int32s) -> Run:
        self._made += 1
        run = Run(self._made, parent, Growing(tokens), Growing(pages), stamp=(self._plan, self._released))
        self._runs[run.number] = run
        return run

    def _count_held(self, run: Run, change: int) -> None:
        self._recount(run)
        child, ancestor = run, run.parent
        while ancestor is not None:
            ancestor.held_below += change
            self._recount(ancestor)
            child, ancestor = ancestor, ancestor.parent
        self._drop_if_empty_root(child)

    def _recount(self, run: Run) -> None:
        """Bring `idle` of this run up to date; an idle leaf joins the queue."""
        idle = 0 if run.held_below else run.length - run.longest_hold
        self.num_idle += idle - run.idle
        run.idle = idle
        self._enqueue(run)

    def _enqueue(self, run: Run) -> None:
        if run.idle and not run.children and run.number in self._runs:
            heapq.heappush(self._queue, (run.stamp, run.number))
            if len(self._queue) > 64 + 4 * len(self._runs):
                self._rebuild_queue()

    def _rebuild_queue(self) -> None:
        """Entries go stale when a run changes; this keeps the queue within a few times the number of runs."""
        self._queue = [(run.stamp, run.number) for run in self._runs.values() if run.idle and not run.children]
        heapq.heapify(self._queue)

    def runs(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def check(self) -> None:
        """Every promise of this module, by walking everything."""
        queued = set(self._queue)
        blocks = idle = 0
        for run in self._runs.values():
            blocks += run.length
            idle += run.idle
            assert run.tokens.size == run.length * self._block, "tokens and pages differ in length"
            below = sum(len(child.holds) + child.held_below for child in run.children.values())
            assert run.held_below == below, "holds below are counted wrongly"
            assert run.idle == (0 if below else run.length - run.longest_hold), "idle blocks are counted wrongly"
            assert all(hold.run is run and hold.length <= run.length for hold in run.holds), "a hold past its run's end"
            if run.parent is None:
                assert self._roots[run.scope] is run, "a root that no scope names"
                assert run.length == 0, "a root with blocks"
            else:
                assert run.length or run.holds, "an empty run"
                key = run.tokens.view[: self._block].tobytes()
                assert run.parent.children[key] is run, "a run that its parent does not know"
            if run.idle and not run.children:
                assert (run.stamp, run.number) in queued, "an idle leaf that no eviction would find"
        assert blocks == self.num_blocks, "blocks are counted wrongly"
        assert idle == self.num_idle, "idle blocks are summed wrongly"


def _equal_blocks(run: Int32s, tokens: Int32s, fit: int, block: int) -> int:
    """How many of the first `fit` blocks are equal."""
    if fit == 0:
        return 0
    differ = run[: fit * block] != tokens[: fit * block]
    first = int(differ.argmax())
    return first // block if differ[first] else fit
