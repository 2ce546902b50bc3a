"""What the children of each conversation do, counted, so that a parent with thousands costs no more than one with two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.core.conversations import StopReason
from worker.core.returns.claims import Claim
from worker.core.returns.classes import Children


@dataclass(slots=True)
class Brood:
    """Of one parent. `turn`: rises whenever it ends a turn itself; `ended`: children that ended one since, `pending`:
    those of them that had not done."""

    members: int = 0
    in_flight: int = 0
    turn: int = 1
    ended: int = 0
    pending: int = 0


class Broods:
    """By parent, who need not be known itself."""

    def __init__(self) -> None:
        self._broods: dict[str, Brood] = {}

    def of(self, parent: str) -> Children:
        """What the children of this conversation do."""
        brood = self._broods.get(parent)
        if brood is None:
            return Children.NONE
        if brood.in_flight:
            return Children.IN_FLIGHT
        if not brood.ended:
            return Children.EARLIER
        return Children.PENDING if brood.pending else Children.DONE

    def move(self, child: Claim, parent: str | None) -> None:
        """`child` is one of `parent`'s now, nobody's if None."""
        if child.parent == parent:
            return
        self.leave(child)
        child.parent = parent
        if parent is not None:
            brood = self._broods.setdefault(parent, Brood())
            brood.members += 1
            brood.in_flight += child.in_flight

    def leave(self, child: Claim) -> None:
        """It is forgotten, or somebody else's."""
        if child.parent is None:
            return
        brood = self._broods[child.parent]
        self._uncount(child, brood)
        brood.members -= 1
        brood.in_flight -= child.in_flight
        if not brood.members:
            del self._broods[child.parent]
        child.parent = None

    def began(self, child: Claim) -> None:
        """`child` is in flight and was not."""
        if child.parent is not None:
            self._broods[child.parent].in_flight += 1

    def ended(self, child: Claim, reason: StopReason) -> None:
        """`child` was in flight and is not."""
        if child.parent is not None:
            self._broods[child.parent].in_flight -= 1
            self.told(child, reason)

    def told(self, child: Claim, reason: StopReason) -> None:
        """`child`, which is not in flight, ended its last turn so."""
        if child.parent is None:
            return
        brood = self._broods[child.parent]
        if child.ended_in != brood.turn:
            child.ended_in, child.is_pending = brood.turn, False
            brood.ended += 1
        pending = reason is not StopReason.END_OF_TURN
        brood.pending += pending - child.is_pending
        child.is_pending = pending

    def parent_ended(self, parent: str) -> None:
        """It ended a turn itself: what its children ended before counts no more."""
        brood = self._broods.get(parent)
        if brood is not None:
            brood.turn += 1
            brood.ended = brood.pending = 0

    @staticmethod
    def _uncount(child: Claim, brood: Brood) -> None:
        if child.ended_in == brood.turn:
            brood.ended -= 1
            brood.pending -= child.is_pending
        child.ended_in, child.is_pending = 0, False

    def check(self, claims: Iterable[Claim]) -> None:
        """Counts are what a walk over all children gives."""
        counted: dict[str, Brood] = {}
        for claim in claims:
            if claim.parent is not None:
                turn = self._broods[claim.parent].turn
                brood = counted.setdefault(claim.parent, Brood(turn=turn))
                brood.members += 1
                brood.in_flight += claim.in_flight
                brood.ended += claim.ended_in == turn
                brood.pending += claim.ended_in == turn and claim.is_pending
        assert counted == self._broods, "children are miscounted"
