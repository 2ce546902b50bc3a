"""A worker's cache of single blocks, as plainly as it can be written: it is told each plan's acts and decides again.

What a request is and when it is admitted, computed and released is told; what it finds, which blocks leave, and which
are demoted is said here once more, by the block and by scans. A block goes by its id, which fixes all that is in front
of it. One tier; no block is copied in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kinroute.replay.plays import PlayedRequest
from worker.core import plan as plans
from worker.core.conversations import News, StopReason
from worker.core.plan import Act, Plan
from worker.core.returns.ages import bucket_of
from worker.core.returns.classes import Children, Features, class_of
from worker.core.returns.tables import ABANDONED, IN_FLIGHT, Tables, unpacked
from worker.core.types import DEFAULT_PRIORITY

Policy: TypeAlias = Literal["lru", "subagent", "return_index"]
MIN_IDLE_PLANS = 32


def ids_of(blocks: Iterable[tuple[int, int]]) -> list[int]:
    return [first + at for first, count in blocks for at in range(count)]


@dataclass
class Talk:
    """A conversation. `last_plan`: in which its last prompt was done. Times are in ms: `ended_ms` when its last request
    was over, `since_ms` from when its age counts."""

    name: str
    parent: str | None = None
    legs: int = 0
    generating: bool = False
    last_plan: int | None = None
    demoted: bool = False
    final: bool = False
    stop: StopReason = StopReason.UNKNOWN
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gap_ms: int | None = None
    ended_ms: int = 0
    since_ms: int = 0

    @property
    def in_flight(self) -> bool:
        return self.legs > 0 or self.generating


@dataclass
class Block:
    """`claim`: the conversation that let go of it last, unless it has come again since. `stamp`: in the how manyth
    release that was."""

    number: int
    above: int | None
    depth: int
    owner: str
    holders: int = 0
    stamp: int = 0
    priority: int = DEFAULT_PRIORITY
    demoted: bool = False
    claim: Talk | None = None


@dataclass
class Run:
    """A request that runs. `path`: ids of prompt and answer. `held`: how many of them it holds as blocks of the cache;
    `own`: pages behind these, `spare` ones that it keeps for who may read them."""

    path: list[int]
    talk: Talk
    commit_until: int
    computed: int
    length: int
    held: int
    prefills: bool
    own: int = 0
    spare: int = 0
    pinned: bool = False
    extends: bool = False


@dataclass
class Said:
    """`hits`: blocks that each request found, by its place. `left`: blocks in the order in which they left, and
    `lowered`: which ones got another priority, and which, by plan."""

    hits: dict[int, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    changed: dict[int, dict[int, int]] = field(default_factory=dict)


class PlainCache:
    def __init__(self, requests: Sequence[PlayedRequest], capacity: int, policy: Policy) -> None:
        self.requests = requests
        self.block_tokens = requests[0].block_tokens
        self.capacity = capacity
        self.policy = policy
        self.is_active = policy == "return_index"
        self.blocks: dict[int, Block] = {}
        self.runs: dict[int, Run] = {}
        self.talks: dict[str, Talk] = {}
        self.tables = Tables()
        self.said = Said()
        self.chunks: list[Run] = []
        self.plan = self.now_ms = self.releases = 0

    def follow(self, plan: Plan) -> None:
        self.plan, self.now_ms = plan.number, plan.time_ms
        for run in self.chunks:
            self.commit(run)
        self.chunks = []
        for act in plan.acts:
            self.act(act)
        self.check()

    def act(self, act: Act) -> None:
        match act:
            case plans.Sampled():
                for key in act.keys:
                    if key in self.runs:
                        self.runs[key].length += 1
            case plans.Admit():
                self.admit(act)
            case plans.Chunk():
                run = self.runs[act.key]
                self.take(run, -(-(run.computed + act.count) // self.block_tokens) - run.held - run.own)
                run.computed += act.count
                if act.sample:
                    self.prefilled(run)
                self.chunks.append(run)
            case plans.Pin():
                self.runs[act.key].pinned = True
            case plans.Return():
                self.demote_children(self.runs[act.key].talk.name)
            case plans.Release() | plans.Suspend():
                self.let_go(act.key, is_over=isinstance(act, plans.Release))
            case plans.Heard():
                self.hear(act)
            case plans.Learned():
                self.tables = unpacked(act.groups, act.values)
            case plans.Switch():
                self.is_active = str(act.policy) == "return_index"
            case _:
                raise AssertionError(f"not of a cache of one tier: {act}")

    # Requests.

    def admit(self, act: plans.Admit) -> None:
        request = self.requests[act.key - 1]
        path = [*ids_of(request.prompt_blocks), *ids_of(request.answer_blocks)]
        length = act.matched + len(act.token_ids) // 4
        found = 0
        # A token at least is computed.
        while found < (length - 1) // self.block_tokens and path[found] in self.blocks:
            found += 1
        if not act.resumed:
            self.said.hits[act.key - 1] = found
        for number in path[:found]:
            self.blocks[number].holders += 1
        talk = self.talks.setdefault(act.conversation, Talk(act.conversation))
        matched = found * self.block_tokens
        self.runs[act.key] = Run(path, talk, act.commit_until, matched, length, found, act.prefills)
        if act.resumed:
            return
        if talk.turns and not talk.in_flight and self.goes_on(talk, matched, length):
            talk.gap_ms = self.now_ms - talk.ended_ms
        for block in self.blocks.values():
            if block.claim is talk:
                block.claim = None
        talk.legs += 1
        talk.turns += 1
        talk.prompt_tokens = length
        talk.parent = act.parent if act.parent is not None else talk.parent
        talk.final, talk.stop = False, StopReason.UNKNOWN
        if talk.demoted:
            talk.demoted = False
            self.raise_again(block for block in self.blocks.values() if block.owner == talk.name)

    def goes_on(self, talk: Talk, matched: int, length: int) -> bool:
        if 2 * matched >= talk.prompt_tokens:
            return True
        ends = [(block.depth + 1) * self.block_tokens for block in self.blocks.values() if block.claim is talk]
        return 2 * length >= talk.prompt_tokens and not any(end > matched for end in ends)

    def prefilled(self, run: Run) -> None:
        if run.prefills:
            run.prefills = False
            run.talk.last_plan = self.plan

    def commit(self, run: Run) -> None:
        full = min(run.computed, run.commit_until) // self.block_tokens
        for at in range(run.held, full):
            number = run.path[at]
            block = self.blocks.get(number)
            if block is None:
                above = run.path[at - 1] if at else None
                block = self.blocks[number] = Block(number, above, at, run.talk.name)
                if not run.extends:
                    run.extends = True
                    self.raise_again(self.blocks[one] for one in run.path[:at] if self.blocks[one].owner != block.owner)
            else:
                run.extends = False
                run.spare += run.pinned
            block.holders += 1
            run.own -= 1
        run.held = max(run.held, full)

    def let_go(self, key: int, *, is_over: bool) -> None:
        run = self.runs.pop(key)
        self.releases += 1
        run.talk.output_tokens = max(0, run.length - run.talk.prompt_tokens)
        for number in run.path[: run.held]:
            block = self.blocks[number]
            block.holders -= 1
            block.stamp = self.releases
            block.claim = run.talk
        if is_over:
            self.prefilled(run)
            run.talk.legs -= 1
            self.ended(run.talk)

    def hear(self, act: plans.Heard) -> None:
        talk = self.talks[act.conversation]
        was_in_flight = talk.in_flight
        if act.news is News.GENERATING:
            talk.generating = True
        elif act.news is News.ENDED:
            talk.generating = False
            talk.stop = act.reason
            talk.final |= act.final
        if was_in_flight:
            self.ended(talk)

    def ended(self, talk: Talk) -> None:
        if talk.in_flight:
            return
        talk.ended_ms = talk.since_ms = self.now_ms
        parent = self.talks.get(talk.parent or "")
        if parent is not None and not parent.in_flight:
            parent.since_ms = self.now_ms

    # Who leaves.

    def take(self, run: Run, count: int) -> None:
        for _ in range(count):
            if self.used() == self.capacity:
                inner = {block.above for block in self.blocks.values()}
                leaves = [one for one in self.blocks.values() if not one.holders and one.number not in inner]
                victim = min(leaves, key=lambda one: (one.priority, self.worth(one), one.stamp))
                del self.blocks[victim.number]
                self.said.left.append(victim.number)
            run.own += 1

    def used(self) -> int:
        return len(self.blocks) + sum(run.own + run.spare for run in self.runs.values())

    def worth(self, block: Block) -> int:
        if not self.is_active:
            return 0
        talk = block.claim
        if talk is None:
            return ABANDONED
        if talk.in_flight:
            return IN_FLIGHT
        return self.tables.value(class_of(self.features(talk)), bucket_of(self.now_ms - talk.since_ms))

    def features(self, talk: Talk) -> Features:
        children = [one for one in self.talks.values() if one.parent == talk.name]
        does = Children.IN_FLIGHT if any(one.in_flight for one in children) else Children.ENDED
        return Features(
            final=talk.final,
            stop=talk.stop,
            is_child=talk.parent is not None,
            turns=talk.turns,
            children=does if children else Children.NONE,
            output_tokens=talk.output_tokens,
            gap_ms=talk.gap_ms,
        )

    # Finished sub-agents.

    def demote_children(self, parent: str) -> None:
        if self.policy != "subagent":
            return
        for child in [name for name, talk in self.talks.items() if talk.parent == parent]:
            group = [*self.descendants(child)[::-1], child]
            talks = [self.talks[one] for one in group]
            idle = all(one.last_plan is None or self.plan - one.last_plan >= MIN_IDLE_PLANS for one in talks)
            if idle and not all(one.demoted for one in talks) and not any(one.in_flight for one in talks):
                for one in group:
                    self.demote(one)

    def descendants(self, name: str) -> list[str]:
        found = [one for one, talk in self.talks.items() if talk.parent == name]
        return [*found, *(below for one in found for below in self.descendants(one))]

    def demote(self, name: str) -> None:
        """What it owns and nobody holds or extends, from the leaves up; its descendants' blocks are no other's."""
        owners = {name, *self.descendants(name)}
        clear: set[int] = set()
        for block in sorted(self.blocks.values(), key=lambda one: -one.depth):
            below = [one.number for one in self.blocks.values() if one.above == block.number]
            if not block.holders and block.owner in owners and clear.issuperset(below):
                clear.add(block.number)
                if block.owner == name:
                    block.demoted = True
                    self.change(block, 0)
        self.talks[name].demoted = True

    def raise_again(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.demoted:
                block.demoted = False
                self.change(block, DEFAULT_PRIORITY)

    def change(self, block: Block, priority: int) -> None:
        if block.priority != priority:
            block.priority = priority
            self.said.changed.setdefault(self.plan, {})[block.number] = priority

    def check(self) -> None:
        assert self.used() <= self.capacity
        assert all(one.above is None or one.above in self.blocks for one in self.blocks.values())
