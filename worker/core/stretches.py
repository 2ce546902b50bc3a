"""Who owns which blocks of a run, and how long they are worth keeping: per stretch, as a run is made of few commits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from worker.core.types import DEFAULT_PRIORITY


class Terms(NamedTuple):
    """On which terms a stretch is kept.

    `owner`: the conversation whose commit inserted it, "" for nobody. `duration_ms`: for how long `priority` holds once
    nobody uses the stretch; 0: for ever. `until_ms`: plan time at which it lapses, 0 while it is not counted.
    `born`: which snapshots of the owner's stretches it is too young for. `demoted`: its owner is a finished sub-agent.
    """

    owner: str = ""
    priority: int = DEFAULT_PRIORITY
    duration_ms: int = 0
    until_ms: int = 0
    born: int = 0
    demoted: bool = False


class Change(msgspec.Struct, frozen=True):
    """Blocks [start, stop) of a run went from `old` to `new`."""

    start: int
    stop: int
    old: Terms
    new: Terms


class Stretches:
    """Covers the blocks [0, length) of a run; each stretch begins at a block."""

    __slots__ = ("_starts", "_terms", "has_demoted")

    def __init__(self, terms: Terms) -> None:
        self._starts = [0]
        self._terms = [terms]
        self.has_demoted = terms.demoted
        """Some stretch is demoted."""

    def extend(self, start: int, terms: Terms) -> None:
        """Blocks from `start`, the run's length so far, are kept on `terms`."""
        self.has_demoted |= terms.demoted
        if self._terms[-1] != terms:
            self._starts.append(start)
            self._terms.append(terms)

    def split(self, length: int) -> Stretches:
        """Keep the first `length` blocks; returns the stretches of the rest, counted from there."""
        first = self._index(length)
        rest = Stretches(self._terms[first])
        rest._starts += [start - length for start in self._starts[first + 1 :]]
        rest._terms += self._terms[first + 1 :]
        rest.has_demoted = any(terms.demoted for terms in rest._terms)
        self.trim(length)
        return rest

    def trim(self, length: int) -> None:
        """Keep the first `length` blocks, at least one."""
        stop = self._index(length - 1) + 1
        del self._starts[stop:], self._terms[stop:]
        self._look_for_demoted()

    def change(self, start: int, length: int, changed: Callable[[Terms], Terms]) -> list[Change]:
        """New terms for the blocks [start, length) of a run with `length` blocks; returns what is different."""
        if start >= length:
            return []
        index = self._index(start)
        before = self._terms[index:]
        after = [changed(terms) for terms in before]
        if after == before:
            return []
        changes: list[Change] = []
        starts, kept = self._starts[:index], self._terms[:index]
        begins, ends = self._starts[index:], [*self._starts[index + 1 :], length]
        if begins[0] < start:
            starts.append(begins[0])
            kept.append(before[0])
            begins[0] = start
        for begin, end, old, new in zip(begins, ends, before, after, strict=True):
            if new != old:
                changes.append(Change(begin, end, old, new))
            if not kept or kept[-1] != new:
                starts.append(begin)
                kept.append(new)
        self._starts, self._terms = starts, kept
        self.has_demoted = any(terms.demoted for terms in kept)
        return changes

    def of_length(self, length: int) -> Iterator[tuple[int, int, Terms]]:
        """(start, stop, terms) of each stretch of a run with `length` blocks."""
        yield from zip(self._starts, [*self._starts[1:], length], self._terms, strict=True)

    def owners(self) -> set[str]:
        return {terms.owner for terms in self._terms}

    def is_timed(self) -> bool:
        return any(terms.duration_ms for terms in self._terms)

    def top(self, block: int = 0) -> int:
        """The highest priority of `block` and all behind it."""
        terms = self._terms
        if len(terms) == 1:
            return terms[0].priority
        return max(one.priority for one in terms[self._index(block) :])

    def priority_at(self, block: int) -> int:
        return self._terms[self._index(block)].priority

    def first_within(self, stop: int, priority: int) -> int:
        """From which block on, up to `stop`, no priority is above `priority`."""
        first = stop
        for index in range(self._index(stop - 1), -1, -1):
            if self._terms[index].priority > priority:
                break
            first = self._starts[index]
        return first

    def first_of(self, length: int, is_one: Callable[[Terms], bool]) -> int:
        """From which block on, up to the run's `length`, all stretches are ones."""
        first = length
        for index in range(len(self._starts) - 1, -1, -1):
            if not is_one(self._terms[index]):
                break
            first = self._starts[index]
        return first

    def _look_for_demoted(self) -> None:
        if self.has_demoted:
            self.has_demoted = any(terms.demoted for terms in self._terms)

    def is_merged(self) -> bool:
        """No two neighbours are kept on the same terms."""
        return all(one != other for one, other in itertools.pairwise(self._terms))

    def _index(self, block: int) -> int:
        """Which stretch `block` lies in."""
        starts = self._starts
        index = len(starts) - 1
        while starts[index] > block:
            index -= 1
        return index
