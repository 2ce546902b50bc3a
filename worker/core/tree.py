"""The run tree: which committed blocks there are, and which pages hold them.

A conversation grows by runs, so a node is a *run*: a stretch of blocks that one path added, its tokens, pages and keys
contiguous arrays. Matching compares arrays; a fork splits a run at a block boundary; eviction cuts a run from its tail.
So match, commit and evict cost per run, not per block.

Children hang at the end of a run only. A *hold* is a run and a length: the path from the root to there stays. Blocks
that no hold covers are *idle*. Tiers get colder from the root down; in each, what is idle and has nothing as warm below
it is in that tier's eviction order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from enginelink.block_keys import BlockScope, scope_key
from worker.core.arrays import EMPTY, Growing, Int32s
from worker.core.events import CacheEvent, Removed, Stored, Updated
from worker.core.eviction import EvictionOrder
from worker.core.runs import NOTHING, Hold, Match, PartMatch, Run, Segment
from worker.core.stretches import Change, Stretches, Terms
from worker.core.tiers import NUM_TIERS, Tier

MAX_CANDIDATES = 32
"""Children that are looked at for the beginning of one block."""


class RunTree:
    """Runs under one root per scope (salt and adapter); scopes share nothing.

    `events` collects what changed until the owner takes it; None collects nothing. `on_split`: hears of each new lower
    part of a run.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._block = tokens_per_block
        self._roots: dict[bytes, Run] = {}
        self._runs: dict[int, Run] = {}
        self._made = 0
        self._owned: dict[str, dict[int, Run]] = {}
        self._plan = 0
        self._released = 0
        self.orders = tuple(EvictionOrder(tier, self._runs) for tier in Tier)
        self.events: list[CacheEvent] | None = None
        self.on_split: Callable[[Run], None] = lambda lower: None
        self.num_idle = [0] * NUM_TIERS
        """Blocks of each tier that no hold covers."""
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

    # Looking up.

    def match(self, scope: bytes, tokens: Int32s, max_blocks: int) -> Match:
        """The longest committed prefix of `tokens`, at most `max_blocks` blocks, in whatever tier. Changes nothing."""
        root = self._roots.get(scope)
        if root is None:
            return NOTHING
        return self.descend(root, 0, tokens, max_blocks)

    def descend(self, run: Run, length: int, tokens: Int32s, max_blocks: int) -> Match:
        """From after `length` blocks of `run` along `tokens`, by whole blocks, at most `max_blocks`."""
        block = self._block
        size = block * tokens.itemsize
        # What came over a wire are bytes already.
        wire: object = tokens.base
        prompt = wire if isinstance(wire, bytes) and len(wire) == tokens.nbytes else tokens.tobytes()
        stop = min(len(prompt) // size, max_blocks) * size
        at = 0
        while True:
            whole = run.tokens.view[length * block :] if length else run.tokens.view
            # One memcmp, no temporary: only the run in which the match ends is compared block by block.
            if not prompt.startswith(whole.data, at) or at + whole.nbytes > stop:
                fit = min(run.pages.size - length, (stop - at) // size)
                same = _equal_blocks(whole, tokens[at // tokens.itemsize :], fit, block)
                return Match(run, length + same, at // size + same)
            at += whole.nbytes
            length = run.pages.size
            child = run.children.get(prompt[at : at + size]) if at < stop else None
            if child is None:
                return Match(run, length, at // size)
            run, length = child, 0

    def match_within(self, match: Match, tokens: Int32s, may_copy: Callable[[int], bool]) -> PartMatch | None:
        """The block behind `match` that shares most of its beginning with `tokens`, the rest of the prompt.

        Only blocks of the device, whose page `may_copy`.
        """
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
            if same <= (best.tokens if best is not None else 0):
                continue
            if index < candidate.ends[Tier.DEVICE] and may_copy(int(candidate.pages.view[index])):
                best = PartMatch(candidate, index, same)
        return best

    def newly_held(self, run: Run | None, length: int) -> int:
        """How many blocks of the device a hold of the first `length` blocks of `run` would keep that no other keeps."""
        count = 0
        while run is not None:
            warm = min(length, run.ends[0])
            if run.holds or run.held_children:
                return count + max(0, warm - run.held_length)
            count += warm
            run = run.parent
            length = run.pages.size if run is not None else 0
        return count

    def path_pages(self, hold: Hold) -> Int32s:
        """Pages of the held path, from the root, each in the tier that its block is in."""
        parts = [hold.run.pages.view[: hold.length]]
        ancestor = hold.run.parent
        while ancestor is not None:
            parts.append(ancestor.pages.view)
            ancestor = ancestor.parent
        return np.concatenate(parts[::-1])

    def segments(self, run: Run | None, length: int, start: int = 0) -> list[Segment]:
        """The path to the first `length` blocks of `run`, from its block `start` on, from the root down."""
        parts: list[Segment] = []
        while run is not None and run.start + length > start:
            first = max(0, start - run.start)
            if first < length:
                parts.append(Segment(run, first, length))
            run = run.parent
            length = run.length if run is not None else 0
        return parts[::-1]

    def cold_segments(self, run: Run | None, length: int) -> list[Segment]:
        """What of the path to there is not on the device, from the root down."""
        parts: list[Segment] = []
        while run is not None and run.ends[Tier.DEVICE] < length:
            parts.append(Segment(run, run.ends[Tier.DEVICE], length))
            if run.ends[Tier.DEVICE]:
                break
            run = run.parent
            length = run.length if run is not None else 0
        return parts[::-1]

    # Holding.

    def hold(self, scope: bytes, match: Match) -> Hold:
        """Keep what `match` found in `scope`; it must be fresh."""
        hold = Hold(match.run or self._root(scope), match.length)
        self.attach(hold)
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
        run.holds.remove(hold)
        self._recount(run)
        while not run.held_children and not run.holds and run.parent is not None:
            run = run.parent
            run.held_children -= 1
            if not run.held_children:
                self._recount(run)
        if run.parent is None:
            self._drop_if_empty_root(run)

    def move(self, hold: Hold, run: Run, length: int) -> None:
        """To another place of its path."""
        if run is hold.run:
            hold.length = length
            self._recount(run)
            return
        moved = Hold(run, length)
        self.attach(moved)
        self.detach(hold)
        run.holds[run.holds.index(moved)] = hold
        hold.run, hold.length = run, length

    def attach(self, hold: Hold) -> None:
        """Count the hold in; stops at the first ancestor that was held before."""
        run = hold.run
        was_held = run.is_held
        run.holds.append(hold)
        self._recount(run)
        parent = run.parent
        while not was_held and parent is not None:
            was_held = bool(parent.holds) or parent.held_children > 0
            parent.held_children += 1
            if parent.held_children == 1:
                for tier, idle in enumerate(parent.idle):
                    if idle:
                        self.num_idle[tier] -= idle
                        parent.idle[tier] = 0
            parent = parent.parent

    # Growing.

    def append(
        self, hold: Hold, tokens: Int32s, keys: bytes, pages: Int32s, terms: Sequence[tuple[int, Terms]]
    ) -> None:
        """New blocks behind `hold`, all of them on the device, and move it to their end.

        In place at a childless end, else in a run of their own. `terms`: how many of the blocks are kept how.
        """
        run = hold.run
        if hold.length < run.length:
            run = self._split(run, hold.length)
        grows = run.parent is not None and not run.children
        previous = run.key_before(run.length)
        if grows:
            first = run.length
            run.tokens.extend(tokens)
            run.pages.extend(pages)
            run.keys += keys
            run.ends = [run.length] * NUM_TIERS
        else:
            first = 0
            run = self._make(run, tokens, pages, bytearray(keys), Stretches(terms[0][1]), [len(pages)] * NUM_TIERS)
        at = first
        for count, kept in terms:
            if at:
                run.stretches.extend(at, kept)
            if kept.owner:
                self._owned.setdefault(kept.owner, {})[run.number] = run
            at += count
        assert at == run.length, "terms for more or fewer blocks than there are"
        self.num_blocks += len(pages)
        if grows:
            self._retop(run)
        else:
            self._link(run, tokens[: self._block].tobytes())
        self.move(hold, run, run.length)
        if self.events is not None:
            begins = not (run.start + first)
            self.events.append(Stored(previous, keys, Tier.DEVICE, tokens.copy(), begins))

    def restore(self, runs: dict[int, Run], made: int, plan: int, released: int) -> None:
        """Begin with these runs, whose members say how they hang together; `recount_all` ends it."""
        self._runs.update(runs)
        self._roots = {run.scope: run for run in runs.values() if run.parent is None}
        self._made, self._plan, self._released = made, plan, released
        for run in sorted(runs.values(), key=lambda run: -run.start - run.length):
            self.num_blocks += run.length
            run.first_tiers = [sum(child.first_tier is tier for child in run.children.values()) for tier in Tier]
            for child in run.children.values():
                _count(run.below, child.top, 1)
            own = run.stretches.top() if run.parent is not None else -1
            run.top = max(own, *run.below) if run.below else own
            self._reindex(run, run.stretches.owners())

    def recount_all(self) -> None:
        """After `restore` and the holds that belong to it."""
        for run in self._runs.values():
            self._recount(run)

    def _split(self, run: Run, length: int) -> Run:
        """Cut `run` after `length` blocks; returns the upper part, which keeps number and parent."""
        block = self._block
        ends, old_tier = run.ends, run.first_tier
        lower = self._make(
            run,
            run.tokens.view[length * block :],
            run.pages.view[length:],
            run.keys[32 * length :],
            run.stretches.split(length),
            [max(0, end - length) for end in ends],
        )
        lower.start, lower.stamp = run.start + length, run.stamp
        lower.children, lower.held_children = run.children, run.held_children
        lower.below, lower.first_tiers = run.below, run.first_tiers
        for child in lower.children.values():
            child.parent = lower
        lower.top = max(lower.stretches.top(), *lower.below) if lower.below else lower.stretches.top()
        lower.holds = [hold for hold in run.holds if hold.length > length]
        for hold in lower.holds:
            hold.run = lower
            hold.length -= length
        run.holds = [hold for hold in run.holds if hold.run is run]
        run.tokens = Growing(run.tokens.view[: length * block])
        run.pages = Growing(run.pages.view[:length])
        del run.keys[32 * length :]
        run.ends = [min(end, length) for end in ends]
        assert run.first_tier == old_tier, "a run whose first block changed with a split"
        run.children = {lower.tokens.view[:block].tobytes(): lower}
        run.below = {lower.top: 1}
        run.first_tiers = [int(tier is lower.first_tier) for tier in Tier]
        run.held_children = int(lower.is_held)
        self._reindex(run, lower.stretches.owners())
        self._reindex(lower, lower.stretches.owners())
        self._recount(run)
        self._recount(lower)
        self.on_split(lower)
        return run

    def _make(
        self, parent: Run | None, tokens: Int32s, pages: Int32s, keys: bytearray, stretches: Stretches, ends: list[int]
    ) -> Run:
        self._made += 1
        stamp = (self._plan, self._released)
        start = parent.start + parent.length if parent is not None else 0
        run = Run(self._made, parent, start, Growing(tokens), Growing(pages), keys, stretches, stamp, ends)
        self._runs[run.number] = run
        return run

    def _link(self, run: Run, first: bytes) -> None:
        """A new run becomes a child of its parent."""
        parent = run.parent
        assert parent is not None
        run.top = run.stretches.top()
        parent.children[first] = run
        parent.first_tiers[run.first_tier] += 1
        _count(parent.below, run.top, 1)
        self._retop(parent)

    def _root(self, scope: bytes) -> Run:
        root = self._roots.get(scope)
        if root is None:
            key = bytearray(scope_key(BlockScope(salt=scope)))
            root = self._make(None, EMPTY, EMPTY, key, Stretches(Terms()), [0] * NUM_TIERS)
            self._roots[scope] = root
            root.scope = scope
        return root

    # Changing what is there.

    def promote(self, segment: Segment, pages: Int32s) -> None:
        """These blocks, all of them in colder tiers and first of those in their run, are on the device in `pages`."""
        run = segment.run
        assert segment.start == run.ends[Tier.DEVICE], "loaded from the middle"
        moved = self._moved(run, segment.start, segment.stop)
        run.pages.view[segment.start : segment.stop] = pages
        self._move_ends(run, [max(end, segment.stop) for end in run.ends])
        self._tell_moves(run, moved)

    def sink(self, run: Run, count: int, source: Tier, target: Tier, pages: Int32s) -> Int32s:
        """The last `count` blocks that `run` has in `source` are in `target` in `pages`; returns those they left."""
        stop = run.ends[source]
        moved = self._moved(run, stop - count, stop)
        left = run.pages.view[stop - count : stop].copy()
        run.pages.view[stop - count : stop] = pages
        self._move_ends(
            run, [min(end, stop - count) if source <= t < target else end for t, end in enumerate(run.ends)]
        )
        self._tell_moves(run, moved)
        return left

    def _move_ends(self, run: Run, ends: list[int]) -> None:
        before = run.first_tier
        run.ends = ends
        if run.parent is not None and run.first_tier is not before:
            run.parent.first_tiers[before] -= 1
            run.parent.first_tiers[run.first_tier] += 1
            self._enqueue(run.parent)
        self._recount(run)

    def _moved(self, run: Run, start: int, stop: int) -> list[tuple[int, int, Tier]]:
        """Blocks [start, stop) by the tier they are in before a move; empty where nobody listens."""
        if self.events is None:
            return []
        parts = [(max(start, run.span(tier)[0]), min(stop, run.span(tier)[1]), tier) for tier in Tier]
        return [part for part in parts if part[0] < part[1]]

    def _tell_moves(self, run: Run, moved: list[tuple[int, int, Tier]]) -> None:
        if self.events is None:
            return
        for start, stop, source in moved:
            keys = bytes(run.keys[32 * start : 32 * stop])
            self.events.append(Removed(keys, source))
            self.events.append(self._stored(run, start, stop, run.tier_of(start)))

    def _stored(self, run: Run, start: int, stop: int, tier: Tier) -> Stored:
        return Stored(
            run.key_before(start),
            bytes(run.keys[32 * start : 32 * stop]),
            tier,
            run.tokens.view[start * self._block : stop * self._block].copy(),
            not run.start + start,
        )

    def snapshot(self) -> list[Stored]:
        """Everything that is there, parents first, as it would be told to who knows nothing."""
        told: list[Stored] = []
        for run in sorted(self._runs.values(), key=lambda run: (run.start, run.number)):
            for tier in Tier:
                start, stop = run.span(tier)
                if start < stop:
                    told.append(self._stored(run, start, stop, tier))
        return told

    def change(self, run: Run, start: int, changed: Callable[[Terms], Terms]) -> list[Change]:
        """New terms for the blocks of `run` from `start` on; returns what is different. Owners stay."""
        changes = run.stretches.change(start, run.length, changed)
        if not changes:
            return changes
        self._retop(run)
        if self.events is not None:
            self.events += [
                Updated(
                    run.key(one.start),
                    run.key(one.stop - 1),
                    one.stop - one.start,
                    one.old.priority,
                    one.new.priority,
                )
                for one in changes
                if one.old.priority != one.new.priority
            ]
        return changes

    def cut(self, run: Run, index: int) -> list[tuple[Tier, Int32s]]:
        """Drop the blocks of `run` from `index` on and all that hangs below; nobody may hold any of it.

        Returns the pages that they had, by tier.
        """
        pages: list[tuple[Tier, Int32s]] = []
        for one in list(self.below(run)):
            pages += self._pages_from(one, 0)
            self._forget(one)
        run.children, run.below, run.first_tiers = {}, {}, [0] * NUM_TIERS
        pages += self._pages_from(run, index)
        parent = run.parent
        if index == 0 and parent is not None:
            first = run.tokens.view[: self._block].tobytes()
            del parent.children[first]
            parent.first_tiers[run.first_tier] -= 1
            _count(parent.below, run.top, -1)
            self._forget(run)
            self._retop(parent)
            self._drop_if_empty_root(parent)
            return pages
        owners = run.stretches.owners()
        self.num_blocks -= run.length - index
        run.pages.trim(index)
        run.tokens.trim(index * self._block)
        del run.keys[32 * index :]
        if run.parent is not None:
            run.stretches.trim(index)
        run.ends = [min(end, index) for end in run.ends]
        self._reindex(run, owners)
        self._recount(run)
        self._retop(run)
        return pages

    @staticmethod
    def below(run: Run) -> Iterator[Run]:
        """Every run that hangs below `run`."""
        left = list(run.children.values())
        while left:
            one = left.pop()
            left += one.children.values()
            yield one

    def _pages_from(self, run: Run, index: int) -> list[tuple[Tier, Int32s]]:
        parts: list[tuple[Tier, Int32s]] = []
        for tier in Tier:
            start, stop = run.span(tier)
            start = max(start, index)
            if start < stop:
                parts.append((tier, run.pages.view[start:stop].copy()))
                if self.events is not None:
                    self.events.append(Removed(bytes(run.keys[32 * start : 32 * stop]), tier))
        return parts

    def _forget(self, run: Run) -> None:
        assert not run.holds, "a run that somebody holds is dropped"
        for tier in Tier:
            self.num_idle[tier] -= run.idle[tier]
        self.num_blocks -= run.length
        del self._runs[run.number]
        self._reindex(run, run.stretches.owners())

    def _drop_if_empty_root(self, run: Run) -> None:
        if run.parent is None and not run.children and not run.holds and self._roots.get(run.scope) is run:
            del self._roots[run.scope]
            del self._runs[run.number]

    # Bookkeeping.

    def owned(self, owner: str) -> list[Run]:
        """Runs in which this conversation owns blocks, in the order in which it came to own some."""
        return list(self._owned.get(owner, {}).values())

    def owned_blocks(self, owner: str) -> int:
        """Blocks that this conversation's own commits inserted and that are still here."""
        return sum(
            stop - start
            for run in self.owned(owner)
            for start, stop, terms in run.stretches.of_length(run.length)
            if terms.owner == owner
        )

    def _reindex(self, run: Run, owners: set[str]) -> None:
        """Of these owners, the run's blocks may have changed: list the run under those that still own some."""
        for owner in owners - {""}:
            if run.number in self._runs and owner in run.stretches.owners():
                self._owned.setdefault(owner, {})[run.number] = run
            elif owner in self._owned:
                self._owned[owner].pop(run.number, None)
                if not self._owned[owner]:
                    del self._owned[owner]

    def _retop(self, run: Run) -> None:
        """Priorities of `run` or right below it changed: bring its own place and its ancestors' up to date."""
        at: Run | None = run
        while at is not None:
            self._enqueue(at)
            own = at.stretches.top() if at.parent is not None else -1
            top = max(own, *at.below) if at.below else own
            if top == at.top:
                return
            if at.parent is not None and at.top >= 0:
                _count(at.parent.below, at.top, -1)
                _count(at.parent.below, top, 1)
            at.top = top
            at = at.parent

    def _recount(self, run: Run) -> None:
        """Bring the idle blocks of this run up to date; it may join an eviction order."""
        held = run.held_length if run.holds or run.held_children else 0
        start = 0
        for tier, end in enumerate(run.ends):
            first = start if start > held else held
            idle = end - first if end > first else 0
            if idle != run.idle[tier]:
                self.num_idle[tier] += idle - run.idle[tier]
                run.idle[tier] = idle
            start = end
        if not run.first_tiers[0]:
            self._enqueue(run)

    def _enqueue(self, run: Run) -> None:
        if run.number not in self._runs:
            return
        for tier in range(NUM_TIERS):
            if run.first_tiers[tier]:
                return
            if run.idle[tier]:
                self.orders[tier].add(run)

    def check(self) -> None:
        """Every promise of this module, by walking everything."""
        blocks = 0
        idle = [0] * NUM_TIERS
        for run in self._runs.values():
            blocks += run.length
            self._check_run(run)
            idle = [total + mine for total, mine in zip(idle, run.idle, strict=True)]
        assert blocks == self.num_blocks, "blocks are counted wrongly"
        assert idle == self.num_idle, "idle blocks are summed wrongly"
        assert all(owner in run.stretches.owners() for owner, owned in self._owned.items() for run in owned.values()), (
            "a run listed under somebody who owns nothing of it"
        )

    def _check_run(self, run: Run) -> None:
        assert run.tokens.size == run.length * self._block, "tokens and pages differ in length"
        assert run.held_children == sum(child.is_held for child in run.children.values()), (
            "held children are miscounted"
        )
        assert run.ends[-1] == run.length, "blocks in no tier"
        assert sorted(run.ends) == run.ends, "tiers that get warmer along a run"
        held = run.held_length
        spans = [run.span(tier) for tier in Tier]
        assert run.idle == [max(0, stop - max(start, held)) for start, stop in spans], "idle blocks are counted wrongly"
        assert all(hold.run is run and hold.length <= run.length for hold in run.holds), "a hold past its run's end"
        tiers = [child.first_tier for child in run.children.values()]
        assert run.first_tiers == [tiers.count(tier) for tier in Tier], "children's tiers are counted wrongly"
        tops = [child.top for child in run.children.values()]
        assert run.below == {top: tops.count(top) for top in set(tops)}, "children's priorities are counted wrongly"
        for tier in Tier:
            if run.is_evictable(tier):
                assert run in self.orders[tier], "idle blocks that no eviction would find, or not by their priority"
        if run.parent is None:
            assert self._roots[run.scope] is run, "a root that no scope names"
            assert run.length == 0, "a root with blocks"
            assert run.children or run.holds, "a root that nothing needs"
            return
        assert run.length, "an empty run"
        assert run.start == run.parent.start + run.parent.length, "a run that does not begin where its parent ends"
        assert run.parent.children[run.tokens.view[: self._block].tobytes()] is run, "a run that its parent disowns"
        warmest = max(
            (tier for tier in Tier if run.parent.span(tier)[0] < run.parent.span(tier)[1]), default=Tier.DEVICE
        )
        assert run.first_tier >= warmest, "a block warmer than the one above it"
        assert run.top == max([run.stretches.top(), *tops]), "a wrong highest priority"
        assert len(run.keys) == 32 * run.length, "blocks without keys"
        stretches = list(run.stretches.of_length(run.length))
        assert all(start < stop for start, stop, _ in stretches), "an empty stretch"
        assert all(run.number in self._owned[terms.owner] for _, _, terms in stretches if terms.owner), "unlisted owner"


def _count(counts: dict[int, int], what: int, by: int) -> None:
    number = counts.get(what, 0) + by
    if number:
        counts[what] = number
    else:
        del counts[what]


def _equal_blocks(run: Int32s, tokens: Int32s, fit: int, block: int) -> int:
    """How many of the first `fit` blocks are equal."""
    if fit == 0:
        return 0
    differ = run[: fit * block] != tokens[: fit * block]
    first = int(differ.argmax())
    return first // block if differ[first] else fit
