"""The parts of the run tree: runs, the holds that keep them, and what a match finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.arrays import Growing
from worker.core.eviction import Stamp
from worker.core.stretches import Stretches


@dataclass(slots=True, eq=False)
class Run:
    """`length` blocks below `parent`. A root has length 0 and no parent.

    `held_children`: children that some hold needs, in them or below. `stamp`: when a path through it was last let go.
    `number`: in the order of making, the same on every rank; ties in eviction go by it.
    """

    number: int
    parent: Run | None
    tokens: Growing
    pages: Growing
    stretches: Stretches
    stamp: Stamp
    children: dict[bytes, Run] = field(default_factory=dict)
    holds: list[Hold] = field(default_factory=list)
    held_children: int = 0
    idle: int = 0
    scope: bytes = b""

    @property
    def length(self) -> int:
        return self.pages.size

    @property
    def held_length(self) -> int:
        """Blocks of it that some hold covers."""
        return self.length if self.held_children else max((hold.length for hold in self.holds), default=0)

    @property
    def is_held(self) -> bool:
        return bool(self.holds) or self.held_children > 0


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


@dataclass(frozen=True, slots=True)
class PartMatch:
    """A match ends inside this block: the first `tokens` tokens of block `index` of `run` are the ones wanted."""

    run: Run
    index: int
    tokens: int
