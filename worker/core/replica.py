"""One rank's state, and the acts that change it. Every rank holds one; the same acts give the same state.

Each act adds what it decided to a rolling digest, which the ranks compare: pages taken, evicted, freed.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from worker.core import plan as plans
from worker.core.arrays import Growing, alike
from worker.core.batches import ChunkOf, batch_of
from worker.core.cache import KvCache
from worker.core.config import CacheConfig, RetentionPolicy, ReusePolicy
from worker.core.conversations import Conversations
from worker.core.demotion import descendants, finished
from worker.core.journal import Decision, Journal
from worker.core.paths import TOKEN_BYTES, path_pages
from worker.core.plan import Plan
from worker.core.returns import tables
from worker.core.returns.index import ReturnIndex
from worker.core.runs import NOTHING, Hold, Match
from worker.core.sequences import Sequence
from worker.core.step_work import PinWork, PullWork, StepWork
from worker.core.tiers import Tier
from worker.core.types import PageId, RequestKey


class Replica:
    """Followers `apply` whole plans. Rank 0's scheduler calls `begin`, `act` for each act, then `finish`."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._journal = Journal()
        self.cache = KvCache(config, self._journal)
        self.sequences: dict[RequestKey, Sequence] = {}
        self.conversations = Conversations(config.max_tracked_conversations)
        self.retention_policy = config.retention_policy
        self.index: ReturnIndex | None = None
        if config.retention_policy is RetentionPolicy.RETURN_INDEX:
            self.index = ReturnIndex(self.cache.tree)
        self.indexes = [self.index] if self.index is not None else []
        """Its own, and those of ghosts, which hear what it hears."""
        self._number = 0
        self._work = StepWork()
        self._chunks: list[ChunkOf] = []
        self._copies: list[tuple[PageId, PageId]] = []
        self._copied_from: list[Hold] = []
        self._handlers: dict[type[plans.Act], Callable[[Any], bool | None]] = {
            plans.Abandon: self._abandon,
            plans.Admit: self._admit,
            plans.Arrived: self._arrive,
            plans.Chunk: self._chunk,
            plans.Clear: self._clear,
            plans.Copied: self._copied,
            plans.Gather: self._gather,
            plans.Heard: self._hear,
            plans.Learned: self._learn,
            plans.Load: self._load,
            plans.Loaded: self._loaded,
            plans.Off: self._switch_off,
            plans.Pin: self._pin,
            plans.Pull: self._pull,
            plans.Refill: self._refill,
            plans.Release: self._release,
            plans.Return: self._return,
            plans.Returned: self._returned,
            plans.Sampled: self._append_sampled,
            plans.Suspend: self._suspend,
            plans.Switch: self._switch,
        }

    def apply(self, plan: Plan) -> StepWork:
        self.begin(plan.number, plan.time_ms)
        for act in plan.acts:
            done = self.act(act)
            assert done, f"plan {plan.number}: rank 0 had pages for {act} and this rank has not"
        return self.finish()

    def begin(self, number: int, now_ms: int = 0) -> None:
        """The last step's chunks are computed: what they filled is committed. `now_ms`: plan time."""
        self._number = number
        self._journal.begin(number)
        self.cache.begin(number, now_ms)
        for index in self.indexes:
            index.begin(now_ms)
        self._work = StepWork()
        for chunk in self._chunks:
            self._commit(chunk.sequence)
        self._chunks = []
        self._copies = []

    def act(self, act: plans.AnyAct) -> bool:
        """Carry out one act. False: it needs pages that are not to be had, and nothing changed."""
        return self._handlers[type(act)](act) is not False

    def finish(self) -> StepWork:
        """Close the plan: the batch of its chunks, and the digest of its decisions."""
        for hold in self._copied_from:
            # A part of a block that is copied is no use of its run, which would be split for it.
            self.cache.tree.detach(hold)
        self._copied_from.clear()
        self.cache.pools.make_ahead()
        self._journal.close()
        self._work.batch = batch_of(self._chunks, self._copies, self.config.tokens_per_block)
        self._work.copies = self.cache.pools.work
        self._work.events = self.cache.take_events()
        return self._work

    @property
    def number(self) -> int:
        """Of the plan that is or was carried out last."""
        return self._number

    @property
    def digest(self) -> bytes:
        """Of every decision up to the last plan that was closed."""
        return self._journal.digest

    @property
    def decisions(self) -> deque[Decision]:
        """The last few thousand, oldest first."""
        return self._journal.decisions

    def _append_sampled(self, act: plans.Sampled) -> None:
        for key, start, stop in alike(act.keys):
            sequence = self.sequences.get(RequestKey(key))
            if sequence is None:
                continue
            if stop == start + 1:
                sequence.tokens.append(act.token_ids[start])
            else:
                sequence.tokens.extend(np.array(act.token_ids[start:stop], np.int32))

    def _prefill_ended(self, sequence: Sequence) -> None:
        if sequence.prefills:
            sequence.prefills = False
            self.conversations.context_ended(sequence.conversation, self._number)

    def _admit(self, act: plans.Admit) -> None:
        cache, tree = self.cache, self.cache.tree
        match = Match(tree.run(act.run), act.length, 0) if act.run else NOTHING
        hold = tree.hold(act.scope, match)
        pages = path_pages(hold)
        key = RequestKey(act.key)
        registers = bool(act.conversation) and self.config.policy is ReusePolicy.PER_CONVERSATION
        num_cold = cache.num_cold(hold)
        sequence = self.sequences[key] = Sequence(
            key=key,
            hold=hold,
            base=act.matched,
            tokens=Growing.on(plans.unpack(act.token_ids)),
            pages=Growing(pages, spare=len(act.token_ids) // self.cache.tree.block_bytes + 2),
            commit_until=act.commit_until,
            computed=act.matched,
            committed=len(pages),
            conversation=act.conversation if registers else "",
            owner=act.conversation if registers else "",
            prefills=registers and act.prefills,
            loading=num_cold > 0 or not cache.pools.is_ready(pages),
            worth=act.worth,
        )
        self._journal.note("admit", act.key, act.run, act.length, act.matched)
        cache.count_match(hold, sequence.tokens.size if act.prefills else 0)
        if act.copy is not None:
            self._copy_later(sequence, *act.copy)
        if registers and not act.resumed:
            sequence.returns = act.prefills and not self.conversations.is_retry(
                act.conversation, act.turn, act.prompt_hash
            )
            self._register(act)

    def _register(self, act: plans.Admit) -> None:
        """Its conversation is known from here on, and what it was demoted for is over."""
        known = self.conversations.find(act.conversation)
        for forgotten in self.conversations.admitted(
            act.conversation, act.scope, act.parent, act.turn, act.prompt_hash
        ):
            self._journal.note("forget", forgotten)
            for index in self.indexes:
                index.forgotten(forgotten)
        if known is None or known.demoted:
            if self.cache.tree.owners.of(act.conversation):
                self.cache.restore(act.conversation)
            self.conversations[act.conversation].demoted = False
        for index in self.indexes:
            prompt_tokens = act.matched + len(act.token_ids) // TOKEN_BYTES
            index.admitted(self.conversations[act.conversation], act.matched, prompt_tokens)

    def _return(self, act: plans.Return) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        sequence.returns = False
        self._demote_children(sequence.conversation)

    def _returned(self, act: plans.Returned) -> None:
        if self.conversations.returned(act.conversation, act.turn):
            self._demote_children(act.conversation)

    def _demote_children(self, parent: str) -> None:
        priority = self.config.finished_subagent_priority
        if priority is None or self.retention_policy is not self.config.retention_policy:
            return
        bound = self.config.finished_subagent_min_idle_iterations
        for verdict in finished(self.conversations, parent, self._number, bound):
            for one in verdict.group:
                below = descendants(self.conversations, one.id) if len(verdict.group) > 1 else ()
                self.cache.demote(one.id, tuple([other.id for other in below]), priority)
                one.demoted = True

    def _load(self, act: plans.Load) -> bool:
        return self.cache.pools.load(self.sequences[RequestKey(act.key)].hold, act.count)

    def _loaded(self, act: plans.Loaded) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        pages = path_pages(sequence.hold)
        assert not self.cache.num_cold(sequence.hold), "blocks that are not on the device are called loaded"
        assert self.cache.pools.is_ready(pages), "blocks that still arrive are called loaded"
        own = sequence.pages.view[sequence.committed :]
        sequence.pages = Growing(np.concatenate([pages, own]))
        sequence.loading = False
        self._journal.note("loaded", sequence.key, len(pages))

    def _copied(self, act: plans.Copied) -> None:
        self.cache.pools.ended(act.number, act.good)
        self._shorten()

    def _switch_off(self, act: plans.Off) -> None:
        self.cache.pools.switch_off(Tier(act.tier))
        self._shorten()

    def _shorten(self) -> None:
        """Blocks were lost that some requests waited for: they go on from what is left of their paths."""
        for sequence in self.sequences.values():
            if sequence.hold.blocks < sequence.committed:
                assert sequence.loading, "a running request lost blocks"
                own = sequence.pages.view[sequence.committed :].copy()
                sequence.committed = sequence.hold.blocks
                sequence.computed = sequence.committed * self.config.tokens_per_block
                sequence.pages = Growing(np.concatenate([path_pages(sequence.hold), own]))
                self._journal.note("lost", sequence.key, sequence.committed)

    def _refill(self, act: plans.Refill) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        lost = plans.unpack(act.token_ids)
        assert sequence.computed + len(lost) == sequence.base, "other tokens than those that were lost"
        sequence.tokens = Growing(np.concatenate([lost, sequence.tokens.view]))
        sequence.base = sequence.computed

    def _copy_later(self, sequence: Sequence, run: int, index: int, tokens: int) -> None:
        """Begin `sequence` with the first tokens of a committed block, which stays until the plan is closed."""
        tree = self.cache.tree
        source = tree.run(run)
        self._copied_from.append(tree.hold(b"", Match(source, index + 1, 0)))
        sequence.copy_from = PageId(int(source.pages.view[index]))
        sequence.computed += tokens

    def _take(self, sequence: Sequence, count: int, act: str) -> bool:
        """`count` more pages."""
        if count <= 0:
            return True
        taken = self.cache.take(count)
        if taken is None:
            return False
        if sequence.copy_from is not None:
            self._copies.append((sequence.copy_from, PageId(int(taken[0]))))
            sequence.copy_from = None
        sequence.pages.extend(taken)
        self._journal.note(act, sequence.key, pages=taken)
        return True

    def _chunk(self, act: plans.Chunk) -> bool:
        sequence = self.sequences[RequestKey(act.key)]
        stop = sequence.computed + act.count
        if not self._take(sequence, sequence.pages_needed(stop, self.config.tokens_per_block), "chunk"):
            return False
        start = sequence.computed
        sequence.computed += act.count
        if act.sample:
            self._prefill_ended(sequence)
        self._chunks.append(ChunkOf(sequence, start, sequence.computed, act.sample))
        return True

    def _gather(self, act: plans.Gather) -> bool:
        return self._take(self.sequences[RequestKey(act.key)], act.count, "gather")

    def _pull(self, act: plans.Pull) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        assert not sequence.pages_needed(sequence.length, self.config.tokens_per_block), "a pull without its pages"
        pages = sequence.pages.view[sequence.committed :].copy()
        self._journal.note("pull", sequence.key, sequence.committed)
        if len(pages):
            self._work.pulls.append(PullWork(sequence.key, act.source, sequence.committed, pages))

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
        elif len(free):
            self.cache.give(free)
        self._journal.note("commit", sequence.key, committed, sequence.committed, pages=free)

    def _pin(self, act: plans.Pin) -> None:
        sequence = self.sequences[RequestKey(act.key)]
        sequence.pinned = True
        pages = sequence.pages.view[: -(-sequence.computed // self.config.tokens_per_block)].copy()
        self._work.pins.append(PinWork(sequence.key, pages, sequence.computed))

    def _release(self, act: plans.Release) -> None:
        sequence = self._let_go(RequestKey(act.key))
        if sequence.conversation:
            self._prefill_ended(sequence)
            self.conversations.leg_ended(sequence.conversation)
            self._changed(sequence.conversation)
        if sequence.pinned:
            self._work.unpins.append(sequence.key)

    def _suspend(self, act: plans.Suspend) -> None:
        self._let_go(RequestKey(act.key))

    def _abandon(self, act: plans.Abandon) -> None:
        if self.conversations.find(act.conversation) is not None:
            self.conversations.context_ended(act.conversation, self._number)
            self.conversations.leg_ended(act.conversation)
            self._changed(act.conversation)

    def _hear(self, act: plans.Heard) -> None:
        if self.conversations.heard(act.conversation, act.news, act.reason, final=act.final):
            self._journal.note("heard", act.conversation, act.news, act.reason, act.final)
            self._changed(act.conversation)

    def _changed(self, conversation: str) -> None:
        for index in self.indexes:
            index.changed(self.conversations[conversation])

    def _learn(self, act: plans.Learned) -> None:
        self._journal.note("learned", zlib.crc32(act.values), *act.groups)
        for index in self.indexes:
            index.learned(tables.unpacked(act.groups, act.values))

    def _switch(self, act: plans.Switch) -> None:
        self._journal.note("switch", act.policy)
        self.retention_policy = act.policy
        if self.index is not None:
            self.index.switch(active=act.policy is RetentionPolicy.RETURN_INDEX)

    def _clear(self, act: plans.Clear) -> None:
        self.cache.clear(act.scope, act.owners)

    def _let_go(self, key: RequestKey) -> Sequence:
        """Its own pages are free, what it committed stays."""
        sequence = self.sequences.pop(key)
        self._journal.note("release", key, pages=sequence.pages.view[sequence.committed :])
        self.cache.release(sequence)
        if self.index is not None:
            self.index.let_go(sequence.hold, sequence.conversation, sequence.length)
        return sequence

    def check(self) -> None:
        """Every page of every tier is in exactly one place, and counts add up."""
        cache, tree = self.cache, self.cache.tree
        cache.check()
        own = [
            int(page)
            for sequence in self.sequences.values()
            for page in (*sequence.pages.view[sequence.committed :], *sequence.spare.view)
        ]
        for tier in Tier:
            committed = [int(page) for run in tree.runs() for page in run.pages.view[slice(*run.span(tier))]]
            places = committed + cache.pools.free[tier].view.tolist() + cache.pools.charged(tier)
            places += own if tier is Tier.DEVICE else []
            assert sorted(places) == list(range(cache.pools.sizes[tier])), f"a {tier.name} page is twice or nowhere"
        block = self.config.tokens_per_block
        for sequence in self.sequences.values():
            assert sequence.hold.blocks == sequence.committed, "a request holds other blocks than it counts"
            assert sequence.computed <= sequence.pages.size * block, "tokens without pages"
            assert sequence.base <= sequence.committed * block or sequence.loading or not self.config.enable_block_reuse
            if not sequence.loading:
                path = path_pages(sequence.hold)
                assert np.array_equal(path, sequence.pages.view[: sequence.committed]), "pages that it does not hold"
                assert not cache.num_cold(sequence.hold), "a running request with blocks in colder tiers"
                assert cache.pools.is_ready(path), "a running request with blocks that still arrive"
        for chunk in self._chunks:
            assert self.sequences.get(chunk.sequence.key) is chunk.sequence, "a step computes for a request that left"
        self.conversations.check()
        if self.index is not None:
            self.index.check()
        copying = sum(copy.hold is not None for copy in cache.pools.copies.running.values())
        holds = sum(len(run.holds) for run in tree.runs())
        assert holds == len(self.sequences) + len(self._copied_from) + copying, "a hold that belongs to nobody"
