"""A load of families: parents that call sub-agents, over three tiers, with returns, retries, aborts and handoffs.

Copies between tiers end some plans later, and now and then fail. Whatever is sampled is token 9.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.worker.core.engines import ANSWER, make_request
from worker.core.config import CacheConfig, ReusePolicy, SchedulerConfig
from worker.core.plan import encode
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.tiers import CopyWork
from worker.core.types import Phase, RequestKey, Sampled

FAMILIES = 12


def family_config(num_pages: int = 256, tokens_per_block: int = 4) -> CacheConfig:
    return CacheConfig(
        num_pages=num_pages,
        tokens_per_block=tokens_per_block,
        policy=ReusePolicy.PER_CONVERSATION,
        num_host_pages=num_pages // 2,
        num_disk_pages=num_pages // 4,
        finished_subagent_priority=1,
        finished_subagent_min_idle_iterations=4,
        max_tracked_conversations=40,
    )


@dataclass
class Families:
    """`steps` makes plans and carries them out on `replica`, one each time it is asked.

    `prompt_tokens`: by how much a turn is longer than the one before, at most. `plan_ms`: between two plans.
    """

    dice: random.Random
    replica: Replica = field(default_factory=lambda: Replica(family_config()))
    prompt_tokens: int = 120
    max_num_tokens: int = 64
    plan_ms: int = 20
    now_ms: int = 0
    _prompts: dict[str, list[int]] = field(default_factory=dict)
    _copies: deque[tuple[int, CopyWork]] = field(default_factory=deque)
    _pinned: list[RequestKey] = field(default_factory=list)
    _keys: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_batch_size=8, max_num_tokens=self.max_num_tokens, handoff_timeout_ms=40 * self.plan_ms
        )
        self.scheduler = Scheduler(config, self.replica, lambda request: b"")

    def steps(self, count: int) -> Iterator[bytes]:
        """Each plan, as it travels."""
        made = 0
        while made < count:
            self.now_ms += self.plan_ms
            self._news()
            planned = self.scheduler.plan(self.now_ms)
            if planned is None:
                continue
            plan, work = planned
            self._copies.extend((plan.number, copy) for copy in work.copies)
            yield encode(plan)
            made += 1
            keys = work.batch.sample_requests if work.batch is not None else ()
            self.scheduler.complete(plan, Sampled(keys, (ANSWER,) * len(keys)))

    def _news(self) -> None:
        dice = self.dice
        while self._copies and self._copies[0][0] < self.replica.number - 2:
            _, copy = self._copies.popleft()
            self.scheduler.copied(copy.number, len(copy.sources) if dice.random() < 0.98 else 0)
        if self.scheduler.load.queued < 4:
            self._submit()
        if dice.random() < 0.05:
            self.scheduler.cancel(RequestKey(dice.randrange(max(1, self._keys - 8), self._keys + 1)))
        if self._pinned and dice.random() < 0.3:
            self.scheduler.released(self._pinned.pop(0))

    def _submit(self) -> None:
        """The next turn of a parent or of one of its sub-agents; sometimes it begins anew."""
        dice = self.dice
        family = dice.randrange(FAMILIES)
        child = dice.randrange(4)
        name = f"{family}/{child}" if child else str(family)
        begun = self._prompts.get(name, [])
        if not begun or len(begun) > 4 * self.prompt_tokens or dice.random() < 0.1:
            begun = [1, 2, 3, 4, 5, 6, 7, 8, child] + [100 + family] * 8
        grown = self._prompts[name] = [*begun, *dice.randbytes(dice.randrange(self.prompt_tokens))]
        self._keys += 1
        phase = dice.choice([Phase.CONTEXT, Phase.AGGREGATED])
        if phase is Phase.CONTEXT:
            self._pinned.append(RequestKey(self._keys))
        self.scheduler.submit(
            make_request(
                self._keys,
                grown,
                phase=phase,
                max_tokens=dice.randrange(1, 20),
                conversation=name,
                parent=str(family) if child else None,
                turn=str(self._keys),
            )
        )
