"""Which runs hold blocks of a conversation, so that what it owns is found without a walk through the tree."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.runs import Run


class Owners:
    """By conversation: the runs in which it owns blocks, in the order in which it came to own some."""

    def __init__(self) -> None:
        self._owned: dict[str, dict[int, Run]] = {}

    def of(self, owner: str) -> list[Run]:
        return list(self._owned.get(owner, {}).values())

    def blocks(self, owner: str) -> int:
        """Blocks that this conversation's own commits inserted and that are still here."""
        return sum(
            stop - start
            for run in self.of(owner)
            for start, stop, terms in run.stretches.of_length(run.length)
            if terms.owner == owner
        )

    def add(self, owner: str, run: Run) -> None:
        """Some blocks of `run` are this conversation's; nobody's if it has no name."""
        if owner:
            owned = self._owned.get(owner)
            if owned is None:
                self._owned[owner] = {run.number: run}
            else:
                owned[run.number] = run

    def add_all(self, run: Run) -> None:
        for owner in run.stretches.owners():
            self.add(owner, run)

    def forget(self, run: Run) -> None:
        """It is gone."""
        self._drop(run.stretches.owners(), run)

    def lost(self, run: Run, before: Iterable[str]) -> None:
        """Some blocks of `run` are gone; these owned blocks of it before."""
        self._drop(set(before) - run.stretches.owners(), run)

    def _drop(self, owners: Iterable[str], run: Run) -> None:
        for owner in owners:
            if owner:
                owned = self._owned[owner]
                del owned[run.number]
                if not owned:
                    del self._owned[owner]

    def check(self, runs: Iterable[Run]) -> None:
        listed = {(owner, run.number) for owner, owned in self._owned.items() for run in owned.values()}
        owning = {(owner, run.number) for run in runs for owner in run.stretches.owners() if owner}
        assert listed == owning, "runs are listed under others than those who own blocks of them"
