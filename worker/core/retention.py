"""How long blocks are worth keeping: durations that lapse, conversations that are demoted, and that come back.

Only priorities change here. A block that is held, or that another path extends, is never demoted; what below it belongs
to those who are demoted with it does not count as another path.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import msgspec

from worker.core.runs import Hold, Run
from worker.core.stretches import Change, Terms
from worker.core.tree import RunTree
from worker.core.types import DEFAULT_PRIORITY


class ChangedStretch(msgspec.Struct, frozen=True):
    """Blocks [start, stop) of run number `run` went from one priority to another."""

    run: int
    start: int
    stop: int
    old: int
    new: int

    @property
    def blocks(self) -> int:
        return self.stop - self.start


class CommittedRetentionHandle:
    """A snapshot of the stretches that a conversation owns. It acts only when told, and once.

    What has died since, has another owner, is held or extended is left out, and what is committed later is not covered.
    """

    def __init__(self, retention: Retention, covered: Mapping[str, int], conversation: str) -> None:
        self._retention = retention
        self._covered = covered
        self._conversation = conversation
        self._applied = False

    def apply(self, priority: int) -> list[ChangedStretch]:
        """Lower what is covered to `priority`; raises RuntimeError the second time."""
        if self._applied:
            raise RuntimeError("a CommittedRetentionHandle is applied once")
        self._applied = True
        return self._retention.demote(self._conversation, self._covered, priority)


class Retention:
    """Changes the terms of what is in the tree. `has_timed`: some block was ever committed with a duration."""

    def __init__(self, tree: RunTree) -> None:
        self._tree = tree
        self.has_timed = False
        self._births = 0
        self._now_ms = 0
        self._lapses: list[tuple[int, int]] = []
        tree.on_split = self._split

    @property
    def births(self) -> int:
        """What is committed from here on is covered only by later snapshots."""
        return self._births

    def plan(self, conversation: str, with_descendants: Iterable[str] = ()) -> CommittedRetentionHandle:
        """`with_descendants`: demoted ones, whose blocks do not count as another path."""
        return CommittedRetentionHandle(self, self._covered(conversation, with_descendants), conversation)

    def demote_now(self, conversation: str, with_descendants: Iterable[str], priority: int) -> list[ChangedStretch]:
        """As a handle that is planned and applied at once."""
        return self.demote(conversation, self._covered(conversation, with_descendants), priority)

    def _covered(self, conversation: str, with_descendants: Iterable[str]) -> dict[str, int]:
        covered = dict.fromkeys((conversation, *with_descendants), self._births)
        self._births += 1
        return covered

    def demote(self, conversation: str, covered: Mapping[str, int], priority: int) -> list[ChangedStretch]:
        """From the leaves upward, in time linear in the runs of the `covered` conversations."""

        def lowered(terms: Terms) -> Terms:
            if terms.owner != conversation or terms.born > covered[conversation]:
                return terms
            return Terms(conversation, min(terms.priority, priority), born=terms.born, demoted=True)

        changed: list[ChangedStretch] = []
        for run, first in self.clear_parts(covered):
            changed += _told(run, self._tree.change(run, first, lowered))
        return changed

    def clear_parts(self, covered: Mapping[str, int]) -> list[tuple[Run, int]]:
        """Runs and the block from which on they, and all below, are owned by `covered` and held by nobody.

        Deepest first. `covered`: by conversation, up to which birth.
        """

        def is_covered(terms: Terms) -> bool:
            return terms.born <= covered.get(terms.owner, -1)

        runs = {run.number: run for owner in covered for run in self._tree.owners.of(owner)}
        clear_children: dict[int, int] = {}
        parts: list[tuple[Run, int]] = []
        for run in sorted(runs.values(), key=lambda run: (-run.start, run.number)) if len(runs) > 1 else runs.values():
            if run.children and len(run.children) != clear_children.get(run.number, 0):
                continue
            first = max(run.held_length, run.stretches.first_of(run.length, is_covered))
            if first < run.length:
                parts.append((run, first))
            if first == 0 and run.parent is not None:
                clear_children[run.parent.number] = clear_children.get(run.parent.number, 0) + 1
        return parts

    def restore(self, conversation: str) -> list[ChangedStretch]:
        """What is left of a demoted conversation has the default priority again."""

        def raised(terms: Terms) -> Terms:
            is_ours = terms.owner == conversation and terms.demoted
            return terms._replace(priority=DEFAULT_PRIORITY, demoted=False) if is_ours else terms

        changed: list[ChangedStretch] = []
        for run in sorted(self._tree.owners.of(conversation), key=lambda run: (run.start, run.number)):
            changed += _told(run, self._tree.change(run, 0, raised))
        return changed

    def extended(self, hold: Hold, owner: str) -> list[ChangedStretch]:
        """A commit of `owner` extended this path: what others' demotion had lowered on it is worth keeping again."""

        def raised(terms: Terms) -> Terms:
            is_others = terms.demoted and (terms.owner != owner or not owner)
            return terms._replace(priority=DEFAULT_PRIORITY, demoted=False) if is_others else terms

        path: list[Run] = []
        run: Run | None = hold.run
        while run is not None:
            if run.stretches.has_demoted:
                path.append(run)
            run = run.parent
        if not path:
            return []
        return [one for run in reversed(path) for one in _told(run, self._tree.change(run, 0, raised))]

    # Durations.

    def begin(self, now_ms: int) -> list[ChangedStretch]:
        """It is `now_ms`, plan time: what has lapsed has the default priority again, unless it is held.

        A block that is held waits: who lets go of it counts its duration anew.
        """
        self._now_ms = now_ms
        if not self._lapses:
            return []
        changed: list[ChangedStretch] = []
        waiting: dict[tuple[int, int], None] = {}
        while self._lapses and self._lapses[0][0] <= now_ms:
            lapse = heapq.heappop(self._lapses)
            run = self._tree.find_run(lapse[1])
            if run is not None:
                held = run.held_length
                changed += _told(run, self._tree.change(run, held, self._lapsed))
                if any(
                    start < held and self._is_over(terms) for start, _, terms in run.stretches.of_length(run.length)
                ):
                    waiting[lapse] = None
        for lapse in waiting:
            heapq.heappush(self._lapses, lapse)
        return changed

    def _is_over(self, terms: Terms) -> bool:
        return 0 < terms.until_ms <= self._now_ms

    def _lapsed(self, terms: Terms) -> Terms:
        if not self._is_over(terms):
            return terms
        return terms._replace(priority=DEFAULT_PRIORITY, duration_ms=0, until_ms=0)

    def let_go(self, run: Run) -> None:
        """A path through `run` was released: its durations count from now."""

        def timed(terms: Terms) -> Terms:
            return terms._replace(until_ms=self._now_ms + terms.duration_ms) if terms.duration_ms else terms

        if run.stretches.is_timed():
            self._tree.change(run, 0, timed)
            self._split(run)

    def _split(self, run: Run) -> None:
        for until_ms in {terms.until_ms for _, _, terms in run.stretches.of_length(run.length)} - {0}:
            heapq.heappush(self._lapses, (until_ms, run.number))


def _told(run: Run, changes: list[Change]) -> list[ChangedStretch]:
    return [
        ChangedStretch(run.number, one.start, one.stop, one.old.priority, one.new.priority)
        for one in changes
        if one.old.priority != one.new.priority
    ]


def blocks_of(changed: Iterable[ChangedStretch]) -> int:
    return sum(one.blocks for one in changed)
