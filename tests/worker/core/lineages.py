"""Conversations with parents on a scheduler without a model, driven plan by plan."""

from __future__ import annotations

from typing import Any

from tests.worker.core.engines import TestEngine, make_engine
from tests.worker.core.trees import ids
from worker.core.config import ReusePolicy
from worker.core.conversations import Conversation, News
from worker.core.outputs import Output
from worker.core.paths import segments
from worker.core.tiers import Tier
from worker.core.types import RequestKey

BOUND = 4
LOW = 1
TENANT = b"tenant"


class Family:
    """Blocks of two tokens; a prompt's last, odd token keeps its blocks whole. Answers are one token and no block."""

    def __init__(self, *, bound: int = BOUND, priority: int | None = LOW, num_pages: int = 64, **members: Any) -> None:
        self.engine: TestEngine = make_engine(
            num_pages=num_pages,
            policy=ReusePolicy.PER_CONVERSATION,
            finished_subagent_priority=priority,
            finished_subagent_min_idle_iterations=bound,
            **members,
        )
        self.replica = self.engine.replica
        self.scheduler = self.engine.scheduler
        self.key = 0

    def submit(self, conversation: str, *prompt: int, parent: str | None = None, **members: Any) -> RequestKey:
        """Queue a request; it begins with the next plan."""
        self.key += 1
        given = {"salt": TENANT} | members
        assert self.engine.submit(self.key, prompt, conversation=conversation, parent=parent, **given) is None
        return RequestKey(self.key)

    def ask(self, conversation: str, *prompt: int, parent: str | None = None, **members: Any) -> list[Output]:
        """One whole answer: a plan that computes it, and one that lets go of it."""
        self.submit(conversation, *prompt, parent=parent, **members)
        return self.engine.run()

    def pass_plans(self, count: int) -> None:
        """Plans in which nothing happens to anybody who is known."""
        for _ in range(count):
            self.scheduler.heard("nobody", News.CLOSED, final=True)
            assert self.engine.step() is not None

    def pass_plans_until_idle(self, conversation: str, steps: int) -> None:
        """In the next plan this conversation is idle for `steps` steps."""
        last = self.known(conversation).last_context_step
        assert last is not None
        self.pass_plans(last + steps - 1 - self.replica.number)

    def known(self, conversation: str) -> Conversation:
        known = self.replica.conversations.find(conversation)
        assert known is not None
        return known

    def is_demoted(self, conversation: str) -> bool:
        return self.known(conversation).demoted

    def priorities(self, *prompt: int) -> list[int]:
        """Of each committed block of `prompt`."""
        tree = self.replica.cache.tree
        match = tree.match(TENANT, ids(*prompt), len(prompt) // 2)
        return [
            segment.run.stretches.priority_at(block)
            for segment in segments(match.run, match.length)
            for block in range(segment.start, segment.stop)
        ]

    def cached(self, *prompt: int) -> int:
        """Blocks of `prompt` that are committed, in any tier."""
        return self.replica.cache.match(TENANT, ids(*prompt), len(prompt) // 2).blocks

    def press(self, num_pages: int) -> None:
        """A stranger's request needs so many pages more than are free."""
        blocks = len(self.replica.cache.pools.free[Tier.DEVICE]) + num_pages
        self.key += 1
        prompt = [1000 * self.key + at for at in range(2 * blocks)]
        assert self.engine.submit(self.key, prompt, salt=b"presser") is None
        self.engine.run()
