"""Synthetic families of agents: sessions made up from a few numbers and a seed, valid as recorded ones are.

The numbers of `plain` are those of 74 recorded coding sessions (`agentic-dev`), rounded; `kinroute trace measure FILE`
prints them for any trace. The other presets change only what they are named for. They show how a policy behaves on a
shape of load; only recordings show what it is worth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kinroute.replay.measures import Spread
from kinroute.replay.traces import Kind, Session, Stop, TracedRequest

SOURCE = "synthetic"
P90_SIGMAS = 1.2816
LONGEST_TAIL = 20
"""No draw is above so many medians, or twice the 90th percentile."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What families are like. "Measured": by `kinroute trace measure`, on agentic-dev, the member of that name."""

    block_tokens: int = 64
    """As agentic-dev has it."""
    root_turns: Spread = Spread(57, 157)
    """Measured."""
    first_prompt_tokens: Spread = Spread(21_600, 79_300)
    """Measured: system prompt, tools and the first message."""
    grown_tokens: Spread = Spread(512, 2_816)
    """Measured: answer and tool results that a turn adds."""
    output_tokens: Spread = Spread(197, 717)
    """Measured."""
    first_token_s: float = 1.0
    """Assumption: the recordings have no time to the first token."""
    token_s: float = 0.022
    """Measured (median)."""
    tool_gap_s: Spread = Spread(5.8, 50)
    """Measured: from an answer that calls a tool to the next request."""
    end_gap_s: Spread = Spread(137, 2_440)
    """Measured: from the end of a turn to the next message of a person."""
    end_stops: float = 0.054
    """Measured: answers that end a turn."""
    edits: float = 0.08
    """Measured: the last block of a prompt is rewritten as the conversation goes on."""
    compactions: float = 0.013
    """Measured: the prompt begins anew behind the system prompt."""
    system_tokens: int = 11_500
    """Measured (`shared_tokens`, p90): what the conversations of one agent type have in common."""
    with_sub_agents: float = 0.47
    """Measured: sessions that have any."""
    sub_agents: Spread = Spread(2, 4)
    """Measured: in a session that has any."""
    sub_turns: Spread = Spread(12, 28)
    """Measured."""
    sub_prompt_tokens: Spread = Spread(2_000, 22_000)
    """Measured (`sub_first_tokens` without the system prompt)."""
    agent_types: int = 2
    """Assumption: children of one type share its system prompt."""
    fan_out: int = 1
    """Children launched at once. Measured: 29 % of sub-agents begin while a sibling lives (`siblings_overlap`)."""
    background: float = 0.1
    """Assumption: children whose parent does not wait for them."""
    resumed: float = 0.07
    """Measured (`sub_resumed`): children that get another task after they had ended."""
    abandoned: float = 0.0
    """Assumption: parents that never come back after they launched their last children."""
    sides_a_turn: float = 0.018
    """Measured: titles and summaries, of one request each."""
    side_tokens: Spread = Spread(1_000, 4_000)
    """Assumption."""


PLAIN = Shape()
PRESETS: Mapping[str, Shape] = {
    "plain": PLAIN,
    "resumed-children": replace(PLAIN, with_sub_agents=1.0, sub_agents=Spread(4, 8), resumed=0.8),
    "background-children": replace(PLAIN, with_sub_agents=1.0, sub_agents=Spread(4, 8), background=1.0),
    "wide-fan-out": replace(PLAIN, with_sub_agents=1.0, sub_agents=Spread(16, 40), fan_out=8, agent_types=1),
    "abandoned-parents": replace(PLAIN, with_sub_agents=1.0, abandoned=0.6),
    "no-sub-agents": replace(PLAIN, with_sub_agents=0.0, sides_a_turn=0.0),
}
"""What each changes is an assumption, chosen to be extreme."""


def synthesize(shape: Shape, sessions: int, seed: int) -> Iterator[Session]:
    """The same sessions for the same seed; the first of them whatever their number."""
    for number in range(sessions):
        draws = random.Random(f"{seed}/{number}")
        yield _Family(shape, draws).session(f"s{number + 1}")


@dataclass(slots=True)
class _Agent:
    """A conversation: who it is, and its prompt so far."""

    name: str
    kind: Kind
    parent: str | None
    blocks: list[tuple[int, int]]
    turns: int
    system_blocks: int = 0
    ended_s: float = 0.0
    had: int = 0
    resumes_at: int | None = None
    """Behind which of its parent's turns it gets another task."""


@dataclass(slots=True)
class _Family:
    shape: Shape
    draws: random.Random
    requests: list[TracedRequest] = field(default_factory=list)
    ids: int = 0
    children: list[_Agent] = field(default_factory=list)
    systems: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By agent type, the blocks of its system prompt."""

    def session(self, name: str) -> Session:
        shape = self.shape
        root = _Agent("root", "root", None, self._fresh(shape.first_prompt_tokens), self._count(shape.root_turns))
        root.system_blocks = min(root.blocks[0][1], shape.system_tokens // shape.block_tokens)
        launches = self._launches(root.turns)
        t_s = 0.0
        while root.had < root.turns:
            launched = launches.get(root.had, 0)
            is_last = root.had + 1 == root.turns
            abandoned = bool(launched) and max(launches) == root.had and self._is(shape.abandoned)
            stop = self._turn(root, t_s, "tool" if launched else "end" if is_last else None)
            waits_s = self._launch(launched, root) if launched else root.ended_s
            self._resume(root)
            if self._is(shape.sides_a_turn):
                self._side(root)
            if abandoned:
                break
            t_s = max(root.ended_s, waits_s) + self._gap_s(stop)
        calls = sorted(self.requests, key=lambda call: call.t_s)
        return Session(name, SOURCE, shape.block_tokens, tuple(calls))

    def _launches(self, turns: int) -> dict[int, int]:
        """How many children each turn launches."""
        shape = self.shape
        left = self._count(shape.sub_agents) if self._is(shape.with_sub_agents) else 0
        launches: dict[int, int] = {}
        while left > 0:
            at = self.draws.randrange(turns)
            launches[at] = launches.get(at, 0) + min(left, shape.fan_out)
            left -= shape.fan_out
        return launches

    def _launch(self, count: int, parent: _Agent) -> float:
        """Run new children to their end; until when the parent waits."""
        shape, waits_s = self.shape, parent.ended_s
        for _ in range(count):
            kind = self.draws.randrange(shape.agent_types)
            if kind not in self.systems:
                size = max(1, shape.system_tokens // shape.block_tokens)
                self.systems[kind] = (self._take(size), size)
            blocks = [self.systems[kind], *self._fresh(shape.sub_prompt_tokens)]
            name = f"sub {len(self.children) + 1}"
            child = _Agent(name, "sub", parent.name, blocks, self._count(shape.sub_turns), self.systems[kind][1])
            child.resumes_at = self._resumes_at(parent)
            self.children.append(child)
            self._run(child, parent.ended_s + self.draws.random())
            if not self._is(shape.background):
                waits_s = max(waits_s, child.ended_s)
        return waits_s

    def _resume(self, root: _Agent) -> None:
        """Children whose turn it is, and who have ended, get another task."""
        for child in self.children:
            if child.resumes_at is not None and child.resumes_at <= root.had and child.ended_s < root.ended_s:
                child.turns += self._count(self.shape.sub_turns)
                self._grow(child)
                self._run(child, root.ended_s + self.draws.random())
                child.resumes_at = self._resumes_at(root)

    def _resumes_at(self, parent: _Agent) -> int | None:
        later = parent.turns - parent.had
        return parent.had + self.draws.randint(1, later) if later and self._is(self.shape.resumed) else None

    def _run(self, child: _Agent, t_s: float) -> None:
        while child.had < child.turns:
            stop = self._turn(child, t_s, "end" if child.had + 1 == child.turns else "tool")
            t_s = child.ended_s + self._gap_s(stop)

    def _side(self, parent: _Agent) -> None:
        name = f"side {len(self.requests)}"
        self._turn(_Agent(name, "side", parent.name, self._fresh(self.shape.side_tokens), 1), parent.ended_s, "end")

    def _turn(self, agent: _Agent, t_s: float, stop: Stop | None) -> Stop:
        """One request at `t_s`, and what it adds to the prompt; how its answer ended, drawn where it is not given."""
        shape = self.shape
        if stop is None:
            stop = "end" if self._is(shape.end_stops) else "tool"
        output = self._count(shape.output_tokens)
        took_s = shape.first_token_s + shape.token_s * output
        call = TracedRequest(
            round(t_s, 3), round(took_s, 3), agent.name, agent.parent, agent.kind, stop, output, tuple(agent.blocks)
        )
        self.requests.append(call)
        agent.ended_s = call.t_s + call.duration_s
        agent.had += 1
        if agent.had < agent.turns:
            self._grow(agent)
        return stop

    def _grow(self, agent: _Agent) -> None:
        if self._is(self.shape.compactions) and agent.system_blocks:
            agent.blocks = [(agent.blocks[0][0], agent.system_blocks)]
            _extend(agent.blocks, self._fresh(self.shape.sub_prompt_tokens))
            return
        if self._is(self.shape.edits):
            first, count = agent.blocks[-1]
            if count > 1:
                agent.blocks = [*agent.blocks[:-1], (first, count - 1)]
        _extend(agent.blocks, self._fresh(self.shape.grown_tokens))

    def _fresh(self, tokens: Spread) -> list[tuple[int, int]]:
        count = max(1, round(self._draw(tokens) / self.shape.block_tokens))
        return [(self._take(count), count)]

    def _take(self, count: int) -> int:
        self.ids += count
        return self.ids - count

    def _gap_s(self, stop: Stop) -> float:
        return self._draw(self.shape.tool_gap_s if stop == "tool" else self.shape.end_gap_s)

    def _count(self, spread: Spread) -> int:
        return max(1, round(self._draw(spread)))

    def _is(self, share: float) -> bool:
        return self.draws.random() < share

    def _draw(self, spread: Spread) -> float:
        """Log-normal through its two numbers."""
        sigma = math.log(spread.p90 / spread.median) / P90_SIGMAS
        most = max(LONGEST_TAIL * spread.median, 2 * spread.p90)
        return min(self.draws.lognormvariate(math.log(spread.median), sigma), most)


def _extend(blocks: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    """In place; runs that follow each other become one."""
    for first, count in more:
        if sum(blocks[-1]) == first:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + count)
        else:
            blocks.append((first, count))
