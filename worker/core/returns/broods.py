"""What the children of each conversation do, counted, so that a parent of thousands costs what one of two does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.core.returns.claims import Claim
from worker.core.returns.classes import Children


@dataclass(slots=True)
class Brood:
    """How many children one conversation has, and how many of them are in flight."""

    members: int = 0
    in_flight: int = 0


class Broods:
    """By parent, who need not be known itself."""

    def __init__(self) -> None:
        self._broods: dict[str, Brood] = {}

    def of(self, parent: str) -> Children:
        """What the children of this conversation do."""
        brood = self._broods.get(parent)
        if brood is None:
            return Children.NONE
        return Children.IN_FLIGHT if brood.in_flight else Children.ENDED

    def follow(self, child: Claim, parent: str | None, *, in_flight: bool) -> None:
        """`child` is one of `parent`'s, nobody's if None, and is in flight or not."""
        if child.parent != parent:
            self.leave(child)
            child.parent = parent
            if parent is not None:
                brood = self._broods.setdefault(parent, Brood())
                brood.members += 1
                brood.in_flight += in_flight
        elif parent is not None:
            self._broods[parent].in_flight += in_flight - child.in_flight
        child.in_flight = in_flight

    def leave(self, child: Claim) -> None:
        """It is forgotten, or somebody else's."""
        if child.parent is None:
            return
        brood = self._broods[child.parent]
        brood.members -= 1
        brood.in_flight -= child.in_flight
        if not brood.members:
            del self._broods[child.parent]
        child.parent = None

    def check(self, claims: Iterable[Claim]) -> None:
        """Counts are what a walk over all children gives."""
        counted: dict[str, Brood] = {}
        for claim in claims:
            if claim.parent is not None:
                brood = counted.setdefault(claim.parent, Brood())
                brood.members += 1
                brood.in_flight += claim.in_flight
        assert counted == self._broods, "children are miscounted"
