"""Recorded turns, grouped into sessions: a family of conversations each, with small ids of its own. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kinroute.recorder.told import ToldTurn
from kinroute.replay.chains import Chains, Runs, Uint64s
from kinroute.replay.traces import Kind, Session, Stop, TracedRequest

SOURCE = "recorded"
MAX_BYTES = 512 << 20
TURN_BYTES = 1000
BLOCK_BYTES = 8
NEAR_TURNS = 1000
"""How far back a generation leg's first leg is looked for."""
STOPS: dict[str | None, Stop] = {"stop": "end", "tool_calls": "tool"}


@dataclass(slots=True)
class _Turn:
    """`is_open`: a context leg, whose answer another request may bring."""

    began_s: float
    ended_s: float
    conversation: str
    parent: str | None
    kind: Kind
    stop: Stop | None
    output_tokens: int
    blocks: Runs
    is_open: bool


@dataclass(slots=True, eq=False)
class _Family:
    chains: Chains = field(default_factory=Chains)
    turns: list[_Turn] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return TURN_BYTES * len(self.turns) + BLOCK_BYTES * self.chains.num_ids


class Families:
    """Takes turns in the order in which they ended, and gives each family to `write` once: at the end, or when all take
    more than `max_bytes`, who was quiet for longest first. What such a family does later is a session of its own.
    """

    def __init__(self, block_tokens: int, write: Callable[[Session], None], *, max_bytes: int = MAX_BYTES) -> None:
        self._block_tokens = block_tokens
        self._write = write
        self._max_bytes = max_bytes
        self._families: OrderedDict[_Family, None] = OrderedDict()
        self._of: dict[str, _Family] = {}
        self._bytes = 0
        self._written = 0
        self.turns = 0
        self.cut = 0
        """Families that were written before the end."""

    def __len__(self) -> int:
        """Sessions so far."""
        return self._written + len(self._families)

    def add(self, told: ToldTurn, began_s: float) -> None:
        family = self._family({told.conversation, told.family} | ({told.parent} if told.parent else set()))
        before = family.num_bytes
        blocks = family.chains.runs(np.frombuffer(told.blocks, "<u8"))
        turn = _Turn(
            began_s,
            began_s + told.duration_s,
            told.conversation,
            told.parent,
            told.kind,
            STOPS.get(told.stop),
            told.output_tokens,
            blocks,
            told.leg == "context",
        )
        first_leg = _first_leg(family.turns, turn) if told.leg == "generation" else None
        if first_leg is None:
            family.turns.append(turn)
            self.turns += 1
        else:
            first_leg.ended_s, first_leg.stop, first_leg.is_open = turn.ended_s, turn.stop, False
            first_leg.output_tokens = turn.output_tokens
        self._bytes += family.num_bytes - before
        while self._bytes > self._max_bytes:
            self._give(next(iter(self._families)))
            self.cut += 1

    def close(self) -> None:
        """Every family that is left is written, by who was there first."""
        for family in sorted(self._families, key=lambda family: min(turn.began_s for turn in family.turns)):
            self._give(family)

    def _family(self, names: set[str]) -> _Family:
        """That of all these conversations; where they were thought to be of several, these become one."""
        known = list(dict.fromkeys(self._of[name] for name in sorted(names) if name in self._of))
        family = max(known, key=lambda one: len(one.turns)) if known else _Family()
        self._families[family] = None
        self._families.move_to_end(family)
        for other in known:
            if other is not family:
                self._join(family, other)
        family.names |= names
        self._of |= dict.fromkeys(names, family)
        return family

    def _join(self, family: _Family, other: _Family) -> None:
        del self._families[other]
        self._bytes -= family.num_bytes + other.num_bytes
        theirs = other.chains.theirs()
        for turn in other.turns:
            turn.blocks = family.chains.runs(_expanded(turn.blocks, theirs))
        family.turns = sorted(family.turns + other.turns, key=lambda turn: turn.ended_s)
        family.names |= other.names
        self._of |= dict.fromkeys(other.names, family)
        self._bytes += family.num_bytes

    def _give(self, family: _Family) -> None:
        del self._families[family]
        for name in family.names:
            del self._of[name]
        self._bytes -= family.num_bytes
        self._written += 1
        self._write(_session(f"s{self._written}", self._block_tokens, family.turns))


def _first_leg(turns: Sequence[_Turn], generation: _Turn) -> _Turn | None:
    """The context leg whose answer this generation leg brought: the conversation's last with this prompt."""
    for turn in reversed(turns[-NEAR_TURNS:]):
        if turn.is_open and turn.conversation == generation.conversation and turn.blocks == generation.blocks:
            return turn
    return None


def _expanded(blocks: Runs, theirs: Uint64s) -> Uint64s:
    return np.concatenate([theirs[:0], *(theirs[first : first + count] for first, count in blocks)])


def _session(name: str, block_tokens: int, turns: Sequence[_Turn]) -> Session:
    turns = sorted(turns, key=lambda turn: turn.began_s)
    numbers = {hashed: f"c{number}" for number, hashed in enumerate(dict.fromkeys(one.conversation for one in turns))}
    parents = _parents(turns)
    began_s = turns[0].began_s
    requests = tuple(
        TracedRequest(
            t_s=round(turn.began_s - began_s, 3),
            duration_s=round(turn.ended_s - turn.began_s, 3),
            conversation=numbers[turn.conversation],
            parent=None if turn.kind == "root" or not (above := parents.get(turn.conversation)) else numbers[above],
            kind=turn.kind,
            stop=turn.stop,
            output_tokens=turn.output_tokens,
            blocks=turn.blocks,
        )
        for turn in turns
    )
    return Session(name, SOURCE, block_tokens, requests)


def _parents(turns: Sequence[_Turn]) -> dict[str, str]:
    """Of each conversation the first that was named and is here, as far as nobody is above itself."""
    here = {turn.conversation for turn in turns}
    parents: dict[str, str] = {}
    for turn in turns:
        if turn.parent in here and turn.conversation not in parents:
            above: str | None = turn.parent
            while above is not None and above != turn.conversation:
                above = parents.get(above)
            if above is None and turn.parent is not None:
                parents[turn.conversation] = turn.parent
    return parents
