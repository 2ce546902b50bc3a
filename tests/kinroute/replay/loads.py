"""Small loads of families, drawn by a seed: roots that talk on, sub-agents that end, side calls."""

from __future__ import annotations

import itertools
import random

from kinroute.replay.plays import PlayedRequest, replay
from kinroute.replay.traces import Kind, Session, TracedRequest

BLOCK = 4


def family(dice: random.Random, turns: int = 5) -> Session:
    """A root of `turns` turns; between two of them now and then sub-agents with a prompt of their own in common."""
    ids = itertools.count(100)
    requests: list[TracedRequest] = []
    root: list[tuple[int, int]] = [(0, 6)]
    now_s = 0.0

    def ask(conversation: str, kind: Kind, blocks: list[tuple[int, int]], at_s: float) -> float:
        duration_s = dice.uniform(0.5, 3.0)
        requests.append(
            TracedRequest(
                t_s=at_s,
                duration_s=duration_s,
                conversation=conversation,
                parent=None if kind == "root" else "root",
                kind=kind,
                stop=dice.choice(("tool", "end", None)),
                output_tokens=dice.randrange(0, 4 * BLOCK),
                blocks=tuple(blocks),
            )
        )
        return at_s + duration_s

    for turn in range(turns):
        end_s = ask("root", "root", root, now_s)
        for child in range(dice.randrange(3)):
            mine = [(20, 3), (next(ids), 1)]
            at_s = end_s + 0.1 * child
            for _ in range(dice.randrange(1, 4)):
                at_s = ask(f"{turn}.{child}", "sub", mine, at_s) + 0.2
                mine = [*mine, (next(ids), 1), (next(ids), 1)]
            end_s = max(end_s, at_s)
        now_s = end_s + dice.uniform(0.5, 8.0)
        root = [*root, *((next(ids), 1) for _ in range(dice.randrange(1, 5)))]
    requests.sort(key=lambda one: one.t_s)
    return Session("s", "test", BLOCK, tuple(requests))


def load(seed: int, count: int, *, alive: int = 4, gap_s: float = 10.0) -> list[PlayedRequest]:
    dice = random.Random(seed)
    sessions = [family(dice) for _ in range(6)]
    return list(itertools.islice(replay(sessions, alive=alive, longest_gap_s=gap_s, draws=dice), count))
