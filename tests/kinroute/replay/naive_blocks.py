"""A cache of single blocks, as plainly as it can be written: one dict, one loop over plans, one scan for a victim.

It says once more, by the block, what a worker does in the open loop; what is fast is compared with it on small loads.
A block is its whole prefix, a tuple of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kinroute.replay.arm import CONTEXT_LEG_S
from kinroute.replay.segments import Blocks, Role

Prefix: TypeAlias = tuple[int, ...]
Worth: TypeAlias = "Callable[[Naive, Block], tuple[float, ...]]"
DEFAULT_PRIORITY = 35
STEP_S = 0.03


class Talking(Blocks, Protocol):
    """A request that says whose it is."""

    @property
    def conversation(self) -> str: ...
    @property
    def parent(self) -> str | None: ...


@dataclass
class Block:
    """`seen_from`: the plan from which on others find it. `stamp`: the how manyth release was the last of it."""

    prefix: Prefix
    owner: str
    seen_from: int
    stamp: int = 0
    holders: int = 0
    priority: int = DEFAULT_PRIORITY
    demoted: bool = False


@dataclass
class Talk:
    """A conversation, and in which plan its last prompt was computed."""

    parent: str | None
    in_flight: int = 0
    last_plan: int = 0
    demoted: bool = False


@dataclass
class Run:
    """A request that runs; `blocks`: all that it holds."""

    number: int
    over: int
    prompt: Prefix
    answer: Prefix
    conversation: str
    blocks: list[Block] = field(default_factory=list)


def lru(cache: Naive, block: Block) -> tuple[float, ...]:
    """What was let go first leaves first."""
    return (block.stamp,)


def by_priority(cache: Naive, block: Block) -> tuple[float, ...]:
    """The published rule: the lowest priority first, then what was let go first."""
    return (block.priority, block.stamp)


class Naive:
    """`hits`: by request. `gone`: blocks in the order in which they left. `subagent_priority`, `min_idle_plans`: the
    published rule's; None: nothing is demoted."""

    def __init__(
        self,
        capacity: int,
        role: Role,
        worth: Worth = lru,
        *,
        subagent_priority: int | None = None,
        min_idle_plans: int = 32,
    ) -> None:
        self.capacity = capacity
        self.role = role
        self.worth = worth
        self.subagent_priority = subagent_priority
        self.min_idle_plans = min_idle_plans
        self.blocks: dict[Prefix, Block] = {}
        self.talks: dict[str, Talk] = {}
        self.running: list[Run] = []
        self.waiting: list[Run] = []
        self.hits: dict[int, int] = {}
        self.gone: list[Prefix] = []
        self.plan = 0
        self.releases = 0
        self.lent = 0

    def play(self, requests: Sequence[Talking]) -> None:
        """One plan after the other, until all is over."""
        left = list(enumerate(requests))
        while left or self.waiting or self.running:
            self.lent = 0
            for run in sorted(self.running, key=lambda run: (run.over, run.number)):
                if run.over <= self.plan:
                    self.end(run)
            while left and _plan_of(left[0][1].t_s) <= self.plan:
                number, request = left.pop(0)
                self.waiting.append(self.arrive(number, request))
            self.admit(dict(enumerate(requests)))
            self.check()
            self.plan += 1

    def arrive(self, number: int, request: Talking) -> Run:
        prompt = _ids(request.prompt_blocks)
        full = (request.output_tokens - 1) // request.block_tokens if self.role == "aggregated" else 0
        over = _plan_of(request.t_s + (CONTEXT_LEG_S if self.role == "context" else request.duration_s))
        return Run(number, over, prompt, _ids(request.answer_blocks)[:full], request.conversation)

    def admit(self, requests: dict[int, Talking]) -> None:
        room = self.capacity - self.num_held() - len(self.running)
        waiting: list[Run] = []
        begun: list[Run] = []
        blocked = False
        for run in self.waiting:
            if len(run.prompt) > self.capacity:
                self.hits[run.number] = 0
                continue
            prefixes = _prefixes(run.prompt)
            there = [self.blocks[one] for one in prefixes if one in self.blocks]
            cost = len(prefixes) - sum(block.holders > 0 for block in there)
            if blocked or any(block.seen_from > self.plan for block in there):
                waiting.append(run)
                continue
            if cost > room:
                blocked = True
                waiting.append(run)
                continue
            room -= cost
            is_all = len(there) == len(prefixes)
            self.hits[run.number] = len(there) - is_all
            if is_all and room:
                # Its last block is computed again, beside the one that is there.
                self.lent += 1
                room -= 1
            run.over = max(run.over, self.plan + 1)
            self.add(run, prefixes, self.plan + 1)
            self.register(requests[run.number])
            begun.append(run)
        self.waiting = waiting
        for run in begun:
            self.demote_children(run.conversation)
        self.running += begun
        self.make_room()

    def end(self, run: Run) -> None:
        self.running.remove(run)
        prefixes = _prefixes(run.prompt + run.answer)[len(run.prompt) :]
        new = sum(one not in self.blocks or not self.blocks[one].holders for one in prefixes)
        if self.num_held() + new <= self.capacity:
            self.add(run, prefixes, self.plan)
            self.make_room()
        self.releases += 1
        for block in run.blocks:
            block.holders -= 1
            block.stamp = self.releases
        if run.conversation:
            self.talks[run.conversation].in_flight -= 1

    def add(self, run: Run, prefixes: list[Prefix], seen_from: int) -> None:
        """Hold these, and make those that are not there."""
        extends = False
        for prefix in prefixes:
            if prefix not in self.blocks:
                self.blocks[prefix] = Block(prefix, run.conversation, seen_from)
                extends = True
            self.blocks[prefix].holders += 1
            run.blocks.append(self.blocks[prefix])
        for block in run.blocks:
            if extends and block.demoted and (block.owner != run.conversation or not block.owner):
                block.priority, block.demoted = DEFAULT_PRIORITY, False

    def make_room(self) -> None:
        while len(self.blocks) + self.lent > self.capacity:
            inner = {prefix[:-1] for prefix in self.blocks}
            leaves = [block for block in self.blocks.values() if not block.holders and block.prefix not in inner]
            victim = min(leaves, key=lambda block: self.worth(self, block))
            del self.blocks[victim.prefix]
            self.gone.append(victim.prefix)

    def num_held(self) -> int:
        return sum(block.holders > 0 for block in self.blocks.values())

    # Finished sub-agents.

    def register(self, request: Talking) -> None:
        if not request.conversation:
            return
        talk = self.talks.setdefault(request.conversation, Talk(request.parent))
        talk.in_flight += 1
        talk.last_plan = self.plan
        if talk.demoted:
            talk.demoted = False
            for block in self.blocks.values():
                if block.owner == request.conversation and block.demoted:
                    block.priority, block.demoted = DEFAULT_PRIORITY, False

    def demote_children(self, parent: str) -> None:
        if self.subagent_priority is None or not parent:
            return
        for child in [name for name, talk in self.talks.items() if talk.parent == parent]:
            group = [*self.descendants(child)[::-1], child]
            talks = [self.talks[one] for one in group]
            if all(talk.demoted for talk in talks) or any(talk.in_flight for talk in talks):
                continue
            if any(self.plan - talk.last_plan < self.min_idle_plans for talk in talks):
                continue
            for one in group:
                self.demote(one)

    def descendants(self, name: str) -> list[str]:
        found = [one for one, talk in self.talks.items() if talk.parent == name]
        return [*found, *(below for one in found for below in self.descendants(one))]

    def demote(self, name: str) -> None:
        """What it owns and nobody holds or extends, from the leaves up; its descendants' blocks are no other's."""
        owners = {name, *self.descendants(name)}
        clear: set[Prefix] = set()
        for prefix in sorted(self.blocks, key=len, reverse=True):
            block = self.blocks[prefix]
            below = [one for one in self.blocks if one[:-1] == prefix]
            if not block.holders and block.owner in owners and clear.issuperset(below):
                clear.add(prefix)
                if block.owner == name:
                    block.priority, block.demoted = min(block.priority, self.subagent_priority or 0), True
        self.talks[name].demoted = True

    def check(self) -> None:
        assert len(self.blocks) + self.lent <= self.capacity
        assert all(len(one) == 1 or one[:-1] in self.blocks for one in self.blocks), "a block whose prefix is gone"


def _plan_of(time_s: float) -> int:
    """The first plan at or after that time."""
    plan = int(time_s / STEP_S)
    return plan if plan * STEP_S >= time_s - 1e-9 else plan + 1


def _ids(runs: Sequence[tuple[int, int]]) -> Prefix:
    return tuple(first + at for first, count in runs for at in range(count))


def _prefixes(ids: Prefix) -> list[Prefix]:
    return [ids[: at + 1] for at in range(len(ids))]
