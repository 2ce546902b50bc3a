"""Ranks of one group in simulated time: rank 0 plans, the others carry out what it sends when they come to it.

Each has a clock of its own and copies that take as long as they take there; only rank 0's board brings them together.
What happens next, to whom, and how long it takes is thrown with dice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.worker.core.cache_pair import Dice
from worker.copy_board import CopyBoard
from worker.core import checkpoint
from worker.core.config import CacheConfig, RetentionPolicy, ReusePolicy, SchedulerConfig
from worker.core.conversations import News, StopReason
from worker.core.journal import Decision
from worker.core.outputs import Failed, Finished, HandoffReady
from worker.core.plan import decode, encode
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.step_work import StepWork
from worker.core.tiers import CopyEnded, CopyWork
from worker.core.types import Phase, Request, RequestKey, Retention, Sampled, Sampling, Stopping, TokenRange

BLOCK = 2
HOUR_MS = 3_600_000
MAX_BEHIND = 3
"""Plans that a rank may lie behind rank 0."""
TRUNKS = ([1, 2] * 10, [1, 2, 2, 1] * 5, [2, 1, 1] * 6)
LINEAGES = (("", None), ("a", None), ("a", None), ("b", "a"), ("c", "b"), ("d", "z"), ("e", "a"), ("a", "c"))
RETENTIONS = (
    None,
    None,
    Retention((TokenRange(0, None, 29),), 30),
    Retention((TokenRange(0, 4, 80, 20), TokenRange(4, None, 0)), 35),
)


def make_config(dice: Dice) -> CacheConfig:
    policy = (ReusePolicy.PER_CONVERSATION, ReusePolicy.PER_CONVERSATION, *ReusePolicy)[dice(5)]
    indexed = policy is ReusePolicy.PER_CONVERSATION and dice(2) > 0
    return CacheConfig(
        num_pages=(8, 12)[dice(2)],
        tokens_per_block=BLOCK,
        policy=policy,
        max_tracked_conversations=(3, 100)[dice(2)],
        num_host_pages=(0, 4, 8, 20)[dice(4)],
        num_disk_pages=(0, 3, 10)[dice(3)],
        finished_subagent_priority=(0, 1, 30)[dice(3)] if policy is ReusePolicy.PER_CONVERSATION else None,
        finished_subagent_min_idle_iterations=(0, 2, 4)[dice(3)],
        retention_policy=RetentionPolicy.RETURN_INDEX if indexed else RetentionPolicy.SUBAGENT,
        max_offload_pages_per_plan=(1, 3, 64)[dice(3)],
        max_onboard_pages_per_plan=(1, 3, 64)[dice(3)],
        tells_events=dice(2) > 0,
    )


@dataclass(slots=True, eq=False)
class Rank:
    """`inbox`: plans that it has not come to. `copies`: when each that it carries out is over, by its own clock."""

    replica: Replica
    clock_ms: int
    inbox: deque[bytes] = field(default_factory=deque)
    copies: dict[int, tuple[int, CopyWork]] = field(default_factory=dict)
    changed: bool = True

    def begin(self, copies: list[CopyWork], dice: Dice) -> None:
        """Most take milliseconds here, some of them seconds."""
        for work in copies:
            takes_ms = 1000 + dice(2000) if dice(20) == 0 else dice(30)
            self.copies[work.number] = (self.clock_ms + takes_ms, work)


class ReplicaGroup:
    """Each method named in `RULES` does one thing if it can be done now, and returns whether it did.

    `decided`: of each plan that somebody has still to carry out, rank 0's digest, its work, and what it decided.
    """

    def __init__(self, dice: Dice) -> None:
        config = make_config(dice)
        self.ranks = [Rank(Replica(config), dice(HOUR_MS)) for _ in range(2 + dice(3))]
        self.leader, *self.followers = self.ranks
        self.board = CopyBoard(len(self.ranks))
        limits = SchedulerConfig(
            max_batch_size=4,
            max_num_tokens=(6, 64)[dice(2)],
            handoff_timeout_ms=50,
            max_queued_requests=6,
            learning_plans=5,
        )
        self.scheduler = Scheduler(limits, self.leader.replica, lambda request: str(request.key).encode())
        self.decided: dict[int, tuple[bytes, tuple[Any, ...], list[Decision]]] = {}
        self.live: list[RequestKey] = []
        self.pinned: list[RequestKey] = []
        self.pulls: list[RequestKey] = []
        self.keys = 0

    # What comes from outside.

    def submit(self, dice: Dice) -> bool:
        trunk = TRUNKS[dice(len(TRUNKS))]
        prompt = trunk[: 1 + dice(len(trunk))] + [1 + dice(2) for _ in range(dice(4))]
        phase = (Phase.AGGREGATED, Phase.AGGREGATED, Phase.CONTEXT, Phase.GENERATION)[dice(4)]
        conversation, parent = LINEAGES[dice(len(LINEAGES))]
        self.keys += 1
        request = Request(
            key=RequestKey(self.keys),
            phase=phase,
            token_ids=np.array(prompt, np.int32),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=1 + dice(12)),
            salt=(b"", b"", b"other")[dice(3)],
            conversation=conversation,
            parent=parent,
            turn=("", "1", "2")[dice(3)],
            retention=RETENTIONS[dice(len(RETENTIONS))],
            first_token=1 if phase is Phase.GENERATION else None,
        )
        if self.scheduler.submit(request) is None:
            self.live.append(request.key)
        return True

    def cancel(self, dice: Dice) -> bool:
        if not self.live:
            return False
        self.scheduler.cancel(self.live[dice(len(self.live))])
        return True

    def fetched(self, dice: Dice) -> bool:
        if not self.pinned:
            return False
        self.scheduler.released(self.pinned.pop(dice(len(self.pinned))))
        return True

    def pull_ends(self, dice: Dice) -> bool:
        if not self.pulls:
            return False
        key = self.pulls.pop(dice(len(self.pulls)))
        if dice(6):
            self.scheduler.pulled(key)
        else:
            self.scheduler.pull_failed(key, "the source is gone")
        return True

    def hear_of(self, dice: Dice) -> bool:
        news = (News.GENERATING, News.ENDED, News.ENDED, News.CLOSED)[dice(4)]
        self.scheduler.heard("abcde"[dice(5)], news, StopReason.TOOL_CALL, final=dice(2) > 0)
        return True

    def return_elsewhere(self, dice: Dice) -> bool:
        self.scheduler.returned("abz"[dice(3)], ("", "1", "3")[dice(3)])
        return True

    def clear(self, dice: Dice) -> bool:
        if dice(8):
            return False
        self.scheduler.clear(*((None, None), (b"other", None), (None, ("a", "b")))[dice(3)])
        return True

    def switch_policy(self, dice: Dice) -> bool:
        configured = self.leader.replica.config.retention_policy
        self.scheduler.switch((configured, configured, RetentionPolicy.LRU)[dice(3)])
        return True

    # What the ranks do.

    def plan(self, dice: Dice) -> bool:
        """Rank 0 plans, and does not wait for those that are not too far behind."""
        made = self.scheduler.plan(self.leader.clock_ms)
        if made is None:
            return False
        plan, work = made
        self.board.began(work.copies)
        self.leader.begin(work.copies, dice)
        self.leader.changed = True
        replica = self.leader.replica
        self.decided[plan.number] = (replica.digest, _told(work), _decisions(replica))
        for rank in self.followers:
            if len(rank.inbox) == MAX_BEHIND:
                self._carry_out(rank, dice)
            rank.inbox.append(encode(plan))
        self.pulls += [pull.request for pull in work.pulls]
        keys = work.batch.sample_requests if work.batch is not None else ()
        for output in self.scheduler.complete(plan, Sampled(keys, tuple(1 + dice(2) for _ in keys))):
            if isinstance(output, HandoffReady):
                self.pinned.append(output.key)
            if isinstance(output, Finished | Failed) and output.key in self.live:
                self.live.remove(output.key)
        return True

    def catch_up(self, dice: Dice) -> bool:
        able = [rank for rank in self.followers if rank.inbox]
        if not able:
            return False
        self._carry_out(able[dice(len(able))], dice)
        return True

    def _carry_out(self, rank: Rank, dice: Dice) -> None:
        """Its next plan, which must come to what it came to on rank 0."""
        plan = decode(rank.inbox.popleft())
        work = rank.replica.apply(plan)
        rank.begin(work.copies, dice)
        rank.changed = True
        digest, told, decisions = self.decided[plan.number]
        if rank.replica.digest != digest:
            pairs = zip(decisions, _decisions(rank.replica), strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), "one decided more than the other")
            raise AssertionError(f"rank {self.ranks.index(rank)} differs in plan {plan.number}: {first}")
        assert _told(work) == told, f"rank {self.ranks.index(rank)} has other work in plan {plan.number}"
        oldest = min(other.replica.number for other in self.followers)
        self.decided = {number: one for number, one in self.decided.items() if number > oldest}

    def time_passes(self, dice: Dice) -> bool:
        """On one rank, and what it has copied by then it reports."""
        rank = self.ranks[dice(len(self.ranks))]
        rank.clock_ms += (1, 10, 30, 1500)[dice(4)]
        for number in [number for number, (due_ms, _) in rank.copies.items() if due_ms <= rank.clock_ms]:
            self._report(rank, number, dice)
        return True

    def copy_ends(self, dice: Dice) -> bool:
        """One of a rank's copies, before those that it began earlier."""
        able = [rank for rank in self.ranks if rank.copies]
        if not able:
            return False
        rank = able[dice(len(able))]
        self._report(rank, sorted(rank.copies)[dice(len(rank.copies))], dice)
        return True

    def _report(self, rank: Rank, number: int, dice: Dice) -> None:
        _, work = rank.copies.pop(number)
        size = len(work.targets)
        good = size if dice(60) else dice(size)
        result = self.board.feed(self.ranks.index(rank), CopyEnded(number, good, "" if good == size else "unreadable"))
        if result is not None:
            self.scheduler.copied(result.number, result.good)
            if result.off:
                self.scheduler.tier_failed(result.tier)

    def restart_from_checkpoint(self, dice: Dice) -> bool:
        """A follower goes on from what it was, written down and read again."""
        rank = self.followers[dice(len(self.followers))]
        rank.replica = checkpoint.load(rank.replica.config, checkpoint.save(rank.replica))
        rank.changed = True
        return True

    # Comparing.

    def look_inside(self, dice: Dice) -> bool:
        """Who is up to date with rank 0 would write down the same, so it will go on alike too."""
        state = None
        for rank in self.followers:
            if not rank.inbox:
                state = state or checkpoint.save(self.leader.replica)
                assert checkpoint.save(rank.replica) == state, f"rank {self.ranks.index(rank)} is in another state"
        return state is not None

    def compare(self) -> None:
        """Every invariant of those that changed; digests were compared as they came."""
        for rank in self.ranks:
            if rank.changed:
                rank.replica.check()
                rank.changed = False

    def settle(self, dice: Dice) -> None:
        """Every rank carries out what it was sent, and ends its copies."""
        for rank in self.followers:
            while rank.inbox:
                self._carry_out(rank, dice)
        for rank in self.ranks:
            for number in list(rank.copies):
                self._report(rank, number, dice)
        assert not len(self.board), "a copy that ended on every rank and still runs"
        assert len({rank.replica.digest for rank in self.ranks}) == 1, "digests differ"
        self.compare()


def _told(work: StepWork) -> tuple[Any, ...]:
    """What a step asks a rank to do, to be compared."""
    batch = work.batch
    arrays = () if batch is None else (batch.token_ids, batch.positions, batch.slots, batch.page_table)
    return (
        [array.tobytes() for array in arrays],
        () if batch is None else (batch.sample_requests, batch.page_copies),
        [(one.number, one.source, one.target, one.sources.tobytes(), one.targets.tobytes()) for one in work.copies],
        [(one.request, one.source, one.first_block, one.pages.tobytes()) for one in work.pulls],
        [(one.request, one.pages.tobytes(), one.num_tokens) for one in work.pins],
        work.unpins,
    )


def _decisions(replica: Replica) -> list[Decision]:
    """Of its last plan."""
    found: list[Decision] = []
    for decision in reversed(replica.decisions):
        if decision.plan != replica.number:
            break
        found.append(decision)
    return found[::-1]


RULES: dict[str, int] = {
    "submit": 5, "cancel": 1, "fetched": 2, "pull_ends": 4, "hear_of": 1, "return_elsewhere": 1, "clear": 1,
    "switch_policy": 1, "plan": 16, "catch_up": 16, "time_passes": 6, "copy_ends": 4, "restart_from_checkpoint": 1,
    "look_inside": 1,
}  # fmt: skip
"""Each rule, and how often it is tried."""
