"""Systems under seeded dice: each is set up, and then its rules are tried at random, as often as they say."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tests.worker.core import cache_pair, replica_group
from tests.worker.core.cache_pair import CachePair, Dice
from tests.worker.core.replica_group import ReplicaGroup


class Game(Protocol):
    """Its rules are methods that do one thing if it can be done now, and return whether they did."""

    def compare(self) -> None:
        """Raises where it is not as it should be."""

    def settle(self, dice: Dice) -> None:
        """Brings to an end what goes on, and compares."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`rules`: by name, and how often each is tried."""

    begin: Callable[[Dice], Game]
    rules: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        """Each as often as it is tried."""
        return [name for name, often in self.rules.items() for _ in range(often)]


KINDS: dict[str, Kind] = {
    "caches": Kind(CachePair, cache_pair.RULES),
    "replicas": Kind(ReplicaGroup, replica_group.RULES),
}


@dataclass(slots=True)
class Play:
    """One game of `kind`, all of it thrown by `seed`. `steps`: what it did so far; `last`: the last rule tried."""

    kind: str
    seed: str
    steps: int = 0
    last: str = ""

    def run(self, tries: int) -> Game:
        """Raises what the game raises; the members say where it was."""
        dice = random.Random(self.seed).randrange
        kind = KINDS[self.kind]
        names = kind.names
        game = kind.begin(dice)
        for _ in range(tries):
            self.last = names[dice(len(names))]
            if getattr(game, self.last)(dice):
                self.steps += 1
                game.compare()
        self.last = "settle"
        game.settle(dice)
        return game
