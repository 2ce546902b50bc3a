"""One rank's state, and the acts that change it. Every rank holds one; the same acts give the same state.

Each act adds what it decided to a rolling digest, which the ranks compare: pages taken, evicted, freed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from worker.core import plan as plans
from worker.core.arrays import Growing, Int32s
from worker.core.batches import ChunkOf, batch_of
from worker.core.cache import Cache, CacheConfig, ReusePolicy
from worker.core.conversations import Conversations
from worker.core.journal import Decision, Journal
from worker.core.plan import Plan
from worker.core.runs import NOTHING, Hold, Match
from worker.core.sequences import Sequence
from worker.core.types import Batch, PageId, RequestKey


@dataclass(frozen=True, slots=True)
class PullWork:
    """Fill `pages` with blocks `first_block` and following of the session `source`."""

    request: RequestKey
    source: bytes
    first_block: int
    pages: Int32s


@dataclass(frozen=True, slots=True)
class PinWork:
    """From the end of this step's forward, `pages` hold the first `num_tokens` tokens of this request for whoever
    presents its session's secret."""

    request: RequestKey
    pages: Int32s
    num_tokens: int


@dataclass(slots=True)
class StepWork:
    """What one plan asks of a rank besides its own bookkeeping. `unpins`: these pins are over."""

    batch: Batch | None = None
    pulls: list[PullWork] = field(default_factory=list)
    pins: list[PinWork] = field(default_factory=list)
    unpins: list[RequestKey] = field(default_factory=list)


class Replica:
    """Followers `apply` whole plans. Rank 0's scheduler calls `begin`, `act` for each act, then `finish`."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.cache = Cache(config)
        self.sequences: dict[RequestKey, Sequence] = {}
        self.conversations = Conversations(config.max_tracked_conversations)
        self.digest = b""
        self._journal = Journal()
        self._number = 0
        self._work = StepWork()
        self._chunks: list[ChunkOf] = []
        self._copies: list[tuple[PageId, PageId]] = []
        self._copied_from: list[Hold] = []

    def apply(self, plan: Plan) -> StepWork:
        self.begin(plan.number)
        for act in plan.acts:
            done = self.act(act)
            assert done, f"plan {plan.number}: rank 0 had pages for {act} and this rank has not"
        return self.finish()

    def begin(self, number: int) -> None:
        """The last step's chunks are computed: what they filled is committed."""
        self._number = number
        self._journal.begin(number)
        self.cache.tree.begin(number)
        self._work = StepWork()
        for chunk in self._chunks:
            self._commit(chunk.sequence)
        self._chunks = []
        self._copies = []

    def act(self, act: plans.AnyAct) -> bool:
        """Carry out one act. False: it needs pages that are not to be had, and nothing changed."""
        match act:
            case plans.Chunk():
                return self._chunk(act)
            case plans.Sampled():
                self._append_sampled(act)
            case plans.Admit():
                self._admit(act)
            case plans.Pull():
                return self._pull(act)
            case plans.Arrived():
                self._arrive(act)
            case plans.Pin():
                self._pin(act)
            case plans.Release():
                self._release(act)
            case plans.Suspend():
                self._suspend(RequestKey(act.key))
            case plans.Abandon():
                if self.conversations.find(act.conversation) is not None:
                    self.conversations.context_ended(act.conversation, self._number)
                    self.conversations.leg_ended(act.conversation)
            case plans.Heard():
                if self.conversations.heard(act.conversation, act.news, act.reason, final=act.final):
                    self._journal.note("heard", act.conversation, act.news, act.reason, act.final)
            case plans.Clear():
                self._journal.note("clear", 0, pages=self.cache.clear())
        return True

    def finish(self) -> StepWork:
        """Close the plan: the batch of its chunks, and the digest of its decisions."""
        for hold in self._copied_from:
            self.cache.tree.release(hold)
        self._copied_from.clear()
        self.digest = self._journal.close()
        self._work.batch = batch_of(self._chunks, self._copies, self.config.tokens_per_block)
        return self._work

    @property
    def decisions(self) -> deque[Decision]:
        """The last few thousand, oldest first."""
        return self._journal.decisions

    def _append_sampled(self, act: plans.Sampled) -> None:
        for key, token in zip(act.keys, act.token_ids, strict=True):
            sequence = self.sequences.get(RequestKey(key))
            if sequence is not None:
                sequence.tokens.append(token)

    def _prefill_ended(self, sequence: Sequence) -> None:
        if sequence.prefills:
            sequence.prefills = False
            self.conversations.context_ended(sequence.conversation, self._number)

    def _admit(self, act: plans.Admit) -> None:
        tree = self.cache.tree
        match = Match(tree.run(act.run), act.length, 0) if act.run else NOTHING
        hold = tree.hold(act.scope, match)
        pages = tree.path_pages(hold)
        key = RequestKey(act.key)
        registers = bool(act.conversation) and self.config.policy is ReusePolicy.PER_CONVERSATION
        sequence = self.sequences[key] = Sequence(
            key=key,
            hold=hold,
            base=act.matched,
            tokens=Growing(plans.unpack(act.token_ids)),
            pages=Growing(pages),
            commit_until=act.commit_until,
            computed=act.matched,
            committed=len(pages),
            conversation=act.conversation if registers else "",
            prefills=registers and act.prefills,
        )
        self._journal.note("admit", act.key, act.run, act.length, act.matched)
        if act.copy is not None:
            self._copy_later(sequence, *act.copy)
        if registers and not act.resumed:
            for forgotten in self.conversations.admitted(act.conversation, act.scope, act.parent):
                self._journal.note("forget", forgotten)

    def _copy_later(self, sequence: Sequence, run: int, index: int, tokens: int) -> None:
        """Begin `sequence` with the first tokens of a committed block, which stays until the plan is closed."""
        tree = self.cache.tree
        source = tree.run(run)
        self._copied_from.append(tree.hold(b"", Match(source, index + 1, 0)))
        sequence.copy_from = PageId(int(source.pages.view[index]))
        sequence.computed += tokens

    def _take(self, sequence: Sequence, until: int, act: str) -> bool:
        """Pages for positions [0, until)."""
        needed = sequence.pages_needed(until, self.config.tokens_per_block)
        if not needed:
            return True
        result = self.cache.take(needed)
        if result is None:
            return False
        taken, evicted = result
        if sequence.copy_from is not None:
            self._copies.append((sequence.copy_from, PageId(int(taken[0]))))
            sequence.copy_from = None
        sequence.pages.extend(taken)
        self._journal.note(act, sequence.key, pages=taken)
        if len(evicted):
            self._journal.note("evict", sequence.key, pages=evicted)
        return True

    def _chunk(self, act: plans.Chunk) -> bool:
        sequence = self.sequences[RequestKey(act.key)]
        if not self._take(sequence, sequence.computed + act.count, "chunk"):
            return False
        start = sequence.computed
        sequence.computed += act.count
        if act.sample:
            self._prefill_ended(sequence)
        self._chunks.append(ChunkOf(sequence, start, sequence.computed, act.sample))
        return True

    def _pull(self, act: plans.Pull) -> bool:
        sequence = self.sequences[RequestKey(act.key)]
        if not self._take(sequence, sequence.length, "pull"):
            return False
        pages = sequence.pages.view[sequence.committed :].copy()
        if len(pages):
            self._work.pulls.append(PullWork(sequence.key, act.source, sequence.committed, pages))
        return True

    def _arrive(self, act: plans.Arrived) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        sequence.computed = sequence.length
        self._commit(sequence)

    def _commit(self, sequence: Sequence) -> None:
        committed = sequence.committed
        free = self.cache.commit(sequence)
        if sequence.committed == committed:
            return
        if sequence.pinned:
            sequence.spare.extend(free)
        else:
            self.cache.give(free)
        self._journal.note("commit", sequence.key, committed, sequence.committed, pages=free)

    def _pin(self, act: plans.Pin) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        sequence.pinned = True
        pages = sequence.pages.view[: -(-sequence.computed // self.config.tokens_per_block)].copy()
        self._work.pins.append(PinWork(sequence.key, pages, sequence.computed))

    def _release(self, act: plans.Release) -> None:
        sequence = self._suspend(RequestKey(act.key))
        if sequence.conversation:
            self._prefill_ended(sequence)
            self.conversations.leg_ended(sequence.conversation)
        if sequence.pinned:
            self._work.unpins.append(sequence.key)

    def _suspend(self, key: RequestKey) -> Sequence:
        """Its own pages are free, what it committed stays."""
        sequence = self.sequences.pop(key)
        self._journal.note("release", key, pages=sequence.pages.view[sequence.committed :])
        self.cache.release(sequence)
        return sequence

    def check(self) -> None:
        """Every page is in exactly one place, and counts add up."""
        cache, tree = self.cache, self.cache.tree
        tree.check()
        owned = [
            int(page)
            for sequence in self.sequences.values()
            for page in (*sequence.pages.view[sequence.committed :], *sequence.spare.view)
        ]
        committed = [int(page) for run in tree.runs() for page in run.pages.view]
        places = owned + committed + cache.free.view.tolist()
        assert sorted(places) == list(range(self.config.num_pages)), "a page is in two places, or in none"
        for sequence in self.sequences.values():
            path = tree.path_pages(sequence.hold)
            assert np.array_equal(path, sequence.pages.view[: sequence.committed]), (
                "a request reads pages it does not hold"
            )
            assert (
                sequence.base <= sequence.committed * self.config.tokens_per_block or not self.config.enable_block_reuse
            )
            assert sequence.computed <= sequence.pages.size * self.config.tokens_per_block, "tokens without pages"
        self.conversations.check()
        holds = sum(len(run.holds) for run in tree.runs())
        assert holds == len(self.sequences), "a hold that belongs to nobody"
