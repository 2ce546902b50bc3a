"""The run tree: which committed blocks there are, and which pages hold them.

A conversation grows by runs, so a node is a *run*: a stretch of blocks that one path added, its tokens and pages
contiguous arrays. Matching compares arrays; a fork splits a run at a block boundary; eviction trims a run from its
tail. So match, commit and evict cost per run, not per block.

Children hang at the end of a run only, so a run with children is never trimmed. A *hold* is a run and a length: the
path from the root to there stays. The blocks that no hold covers are *idle*; they leave in the order in which their
runs were last let go, leaves first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from worker.core.arrays import Growing, Int32s
from worker.core.eviction import EvictionOrder, Stamp
from worker.core.runs import NOTHING, Hold, Match, PartMatch, Run
from worker.core.stretches import Stretches

EMPTY = np.empty(0, np.int32)
MAX_CANDIDATES = 32
"""Children that are looked at for the beginning of one block."""


class RunTree:
    """Runs under one root per scope (salt and adapter); scopes share nothing."""

    def __init__(self, tokens_per_block: int) -> None:
        self._block = tokens_per_block
        self._roots: dict[bytes, Run] = {}
        self._runs: dict[int, Run] = {}
        self._made = 0
        self._owned: dict[str, dict[int, Run]] = {}
        self._order = EvictionOrder()
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

    def match_within(self, match: Match, tokens: Int32s) -> PartMatch | None:
        """The block behind `match` that shares most of its beginning with `tokens`, the rest of the prompt."""
        run = match.run
        if run is None or not len(tokens):
            return None
        if match.length < run.length:
            candidates = [(run, match.length)]
        else:
            candidates = [(child, 0) for child in itertools.islice(run.children.values(), MAX_CANDIDATES)]
        best: PartMatch | None = None
        for candidate, index in candidates:
            block = candidate.tokens.view[index * self._block : (index + 1) * self._block]
            same = _equal_blocks(block, tokens, min(len(block), len(tokens)), 1)
            if same > (best.tokens if best is not None else 0):
                best = PartMatch(candidate, index, same)
        return best

    def newly_held(self, run: Run | None, length: int) -> int:
        """How many blocks a hold of the first `length` blocks of `run` would keep that no other keeps."""
        count = 0
        while run is not None:
            count += max(0, length - run.held_length)
            if run.is_held:
                break
            run = run.parent
            length = run.length if run is not None else 0
        return count

    def hold(self, scope: bytes, match: Match) -> Hold:
        """Keep what `match` found in `scope`; it must be fresh."""
        hold = Hold(match.run or self._root(scope), match.length)
        self._attach(hold)
        return hold

    def release(self, hold: Hold) -> None:
        """The path is let go: its runs take this moment's stamp, and what became idle joins the eviction order."""
        self._released += 1
        stamp = (self._plan, self._released)
        ancestor: Run | None = hold.run
        while ancestor is not None:
            ancestor.stamp = stamp
            ancestor = ancestor.parent
        self._detach(hold)

    def path_pages(self, hold: Hold) -> Int32s:
        """Pages of the held path, from the root."""
        parts = [hold.run.pages.view[: hold.length]]
        ancestor = hold.run.parent
        while ancestor is not None:
            parts.append(ancestor.pages.view)
            ancestor = ancestor.parent
        return np.concatenate(parts[::-1])

    def commit(self, hold: Hold, tokens: Int32s, pages: Int32s, owner: str) -> tuple[Int32s, Int32s]:
        """Add the blocks `tokens` in `pages` behind `hold`, and move the hold to their end. What is new is `owner`'s.

        What somebody else committed meanwhile is kept instead of ours. Returns the pages that hold these blocks now,
        and those of `pages` that are free again.
        """
        found = self._descend(hold.run, hold.length, tokens)
        kept = pages.copy()
        self._pages_between(hold, found, kept)
        free = pages[: found.blocks].copy()
        assert found.run is not None
        run, length = found.run, found.length
        if found.blocks < len(pages):
            run, length = self._append(run, length, tokens[found.blocks * self._block :], pages[found.blocks :], owner)
        self._move(hold, run, length)
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

    def _append(self, run: Run, length: int, tokens: Int32s, pages: Int32s, owner: str) -> tuple[Run, int]:
        """New blocks after `length` blocks of `run`: in place at a childless end, else in a run of their own."""
        if length < run.length:
            run = self._split(run, length)
        if run.parent is None or run.children:
            child = self._make(run, tokens, pages, Stretches(owner))
            run.children[tokens[: self._block].tobytes()] = child
            run = child
        else:
            run.stretches.extend(run.length, owner)
            run.tokens.extend(tokens)
            run.pages.extend(pages)
        if owner:
            self._owned.setdefault(owner, {})[run.number] = run
        self.num_blocks += len(pages)
        self._recount(run)
        return run, run.length

    def _split(self, run: Run, length: int) -> Run:
        """Cut `run` after `length` blocks; returns the upper part, which keeps number and parent."""
        block = self._block
        stretches = run.stretches.split(length)
        lower = self._make(run, run.tokens.view[length * block :], run.pages.view[length:], stretches)
        lower.stamp = run.stamp
        lower.children, lower.held_children = run.children, run.held_children
        for child in lower.children.values():
            child.parent = lower
        lower.holds = [hold for hold in run.holds if hold.length > length]
        for hold in lower.holds:
            hold.run = lower
            hold.length -= length
        run.holds = [hold for hold in run.holds if hold.run is run]
        run.tokens = Growing(run.tokens.view[: length * block])
        run.pages = Growing(run.pages.view[:length])
        run.children = {lower.tokens.view[:block].tobytes(): lower}
        run.held_children = int(lower.is_held)
        self._reindex(run, lower.stretches.owners())
        self._reindex(lower, lower.stretches.owners())
        self._recount(run)
        self._recount(lower)
        return run

    def _reindex(self, run: Run, owners: set[str]) -> None:
        """Of these owners, the run's blocks may have changed: list the run under those that still own some."""
        for owner in owners - {""}:
            if run.number in self._runs and owner in run.stretches.owners():
                self._owned.setdefault(owner, {})[run.number] = run
            elif owner in self._owned:
                self._owned[owner].pop(run.number, None)
                if not self._owned[owner]:
                    del self._owned[owner]

    def owned_blocks(self, owner: str) -> int:
        """Blocks that this conversation's own commits inserted and that are still here."""
        return sum(
            stop - start
            for run in self._owned.get(owner, {}).values()
            for start, stop, whose in run.stretches.of_length(run.length)
            if whose == owner
        )

    def evict(self, count: int) -> Int32s:
        """Drop up to `count` idle blocks, least recently let go first, from the tail of leaves; returns their pages."""
        pages: list[Int32s] = []
        left = count
        while left:
            number = self._order.first(self._is_evictable)
            if number is None:
                break
            run = self._runs[number]
            cut = min(left, run.idle)
            pages.append(self._trim(run, cut)[::-1])
            left -= cut
        return np.concatenate(pages) if pages else EMPTY

    def _is_evictable(self, stamp: Stamp, number: int) -> bool:
        run = self._runs.get(number)
        return run is not None and run.stamp == stamp and run.idle > 0 and not run.children

    def _trim(self, run: Run, count: int) -> Int32s:
        keep = run.length - count
        first = run.tokens.view[: self._block].tobytes()
        owners = run.stretches.owners()
        cut = run.pages.trim(keep)
        run.tokens.trim(keep * self._block)
        self.num_blocks -= count
        self._recount(run)
        if keep:
            run.stretches.trim(keep)
            self._reindex(run, owners)
            return cut
        parent = run.parent
        assert parent is not None, "a root has no blocks to drop"
        del parent.children[first]
        del self._runs[run.number]
        self._reindex(run, owners)
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
            root = self._roots[scope] = self._make(None, EMPTY, EMPTY, Stretches(""))
            root.scope = scope
        return root

    def _make(self, parent: Run | None, tokens: Int32s, pages: Int32s, stretches: Stretches) -> Run:
        self._made += 1
        stamp = (self._plan, self._released)
        run = Run(self._made, parent, Growing(tokens), Growing(pages), stretches, stamp)
        self._runs[run.number] = run
        return run

    def _attach(self, hold: Hold) -> None:
        """Count the hold in; stops at the first ancestor that was held before."""
        run = hold.run
        was_held = run.is_held
        run.holds.append(hold)
        self._recount(run)
        while not was_held and run.parent is not None:
            run = run.parent
            was_held = run.is_held
            run.held_children += 1
            self._recount(run)

    def _detach(self, hold: Hold) -> None:
        """The other way round. A root that nothing needs is forgotten."""
        run = hold.run
        run.holds.remove(hold)
        self._recount(run)
        while not run.is_held and run.parent is not None:
            run = run.parent
            run.held_children -= 1
            self._recount(run)
        self._drop_if_empty_root(run)

    def _move(self, hold: Hold, run: Run, length: int) -> None:
        """To a place further down its path."""
        if run is hold.run:
            hold.length = length
            self._recount(run)
            return
        moved = Hold(run, length)
        self._attach(moved)
        self._detach(hold)
        run.holds[run.holds.index(moved)] = hold
        hold.run, hold.length = run, length

    def _recount(self, run: Run) -> None:
        """Bring `idle` of this run up to date; an idle leaf joins the eviction order."""
        idle = run.length - run.held_length
        self.num_idle += idle - run.idle
        run.idle = idle
        self._enqueue(run)

    def _enqueue(self, run: Run) -> None:
        if run.idle and not run.children and run.number in self._runs:
            self._order.add(run)
            if self._order.is_crowded(len(self._runs)):
                self._order.rebuild(one for one in self._runs.values() if one.idle and not one.children)

    def runs(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def check(self) -> None:
        """Every promise of this module, by walking everything."""
        blocks = idle = 0
        for run in self._runs.values():
            blocks += run.length
            idle += run.idle
            assert run.tokens.size == run.length * self._block, "tokens and pages differ in length"
            held = sum(child.is_held for child in run.children.values())
            assert run.held_children == held, "held children are counted wrongly"
            assert run.idle == run.length - run.held_length, "idle blocks are counted wrongly"
            assert all(hold.run is run and hold.length <= run.length for hold in run.holds), "a hold past its run's end"
            if run.parent is None:
                assert self._roots[run.scope] is run, "a root that no scope names"
                assert run.length == 0, "a root with blocks"
                assert run.children or run.holds, "a root that nothing needs"
            else:
                assert run.length, "an empty run"
                key = run.tokens.view[: self._block].tobytes()
                assert run.parent.children[key] is run, "a run that its parent does not know"
                stretches = list(run.stretches.of_length(run.length))
                assert all(start < stop for start, stop, _ in stretches), "an empty stretch"
                assert all(run.number in self._owned[owner] for _, _, owner in stretches if owner), "an owner unlisted"
            if run.idle and not run.children:
                assert run in self._order, "an idle leaf that no eviction would find"
        assert blocks == self.num_blocks, "blocks are counted wrongly"
        assert idle == self.num_idle, "idle blocks are summed wrongly"
        assert all(owner in run.stretches.owners() for owner, owned in self._owned.items() for run in owned.values()), (
            "a run listed under somebody who owns nothing of it"
        )


def _equal_blocks(run: Int32s, tokens: Int32s, fit: int, block: int) -> int:
    """How many of the first `fit` blocks are equal."""
    if fit == 0:
        return 0
    differ = run[: fit * block] != tokens[: fit * block]
    first = int(differ.argmax())
    return first // block if differ[first] else fit
