"""The return index: what each idle conversation's blocks are worth, by its class and its age.

A run belongs to whoever let go of it last. While that conversation is idle its runs are worth what the tables say of
its class at its age, the same for all of them; while it is in flight, more than anything idle. A run whose conversation
has gone on elsewhere (after a compaction, an edit, a side call) is worth nothing: nobody's latest path leads there.
A conversation's age counts from the end of its last turn, or of its children's, where one ended later.

Everything here is decided alike on every rank: ages are plan time, tables arrive in plans as integers. Only rank 0 has
a watcher, which learns (`learner`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from worker.core.conversations import Conversation
from worker.core.paths import TOKEN_BYTES
from worker.core.returns.ages import EDGES_MS, NUM_BUCKETS, bucket_of
from worker.core.returns.broods import Broods
from worker.core.returns.claims import Claim
from worker.core.returns.classes import Features, class_of
from worker.core.returns.tables import ABANDONED, IN_FLIGHT, Tables
from worker.core.runs import Hold, Run
from worker.core.tree import RunTree


class Watcher(Protocol):
    """Hears what can be learned; ages are in ms."""

    def idled(self, group: int, from_ms: int, to_ms: int) -> None:
        """A conversation of this class was idle from one age to another."""

    def returned(self, group: int, age_ms: int) -> None:
        """One came back at this age."""


class Idle(NamedTuple):
    """A conversation's class, and from which age to which it is idle without anybody having been told."""

    group: int
    from_ms: int
    to_ms: int


class ReturnIndex:
    """Of one replica; sets the values of the runs in `tree`."""

    def __init__(self, tree: RunTree) -> None:
        self._tree = tree
        self._now_ms = 0
        self._made = 0
        self._claims: dict[str, Claim] = {}
        self._broods = Broods()
        self._due: list[tuple[int, int, Claim]] = []
        self.tables = Tables()
        self.is_active = True
        self.watcher: Watcher | None = None

    def begin(self, now_ms: int) -> None:
        """Plan time goes on: conversations grow older."""
        self._now_ms = now_ms
        while self._due and self._due[0][0] <= now_ms:
            due_ms, _, claim = heapq.heappop(self._due)
            if claim.due_ms == due_ms:
                claim.due_ms = None
                claim.bucket = bucket_of(now_ms - claim.since_ms)
                self._revalue(claim)
                self._await_next(claim)

    def learned(self, tables: Tables) -> None:
        """Whatever is idle is worth what these say."""
        self.tables = tables
        self._revalue_all()

    def switch(self, *, active: bool) -> None:
        """Not active: all runs are worth the same, so only priorities and stamps count."""
        self.is_active = active
        self._revalue_all()

    def find(self, conversation: str) -> Claim | None:
        return self._claims.get(conversation)

    def idle(self) -> Iterator[Idle]:
        """Every conversation that is idle now, and was known of before this plan."""
        for claim in self._claims.values():
            if not claim.in_flight and claim.counted_ms < self._now_ms:
                yield Idle(claim.group, claim.counted_ms - claim.since_ms, self._now_ms - claim.since_ms)

    # What requests and the edge tell.

    def admitted(self, known: Conversation, matched_tokens: int, prompt_tokens: int) -> None:
        """A request of it begins, behind a match of so many tokens."""
        claim = self._claims.get(known.id)
        if claim is None:
            claim = self._claims[known.id] = self._make(known)
        elif not claim.in_flight:
            self._count(claim)
            if self._goes_on(claim, matched_tokens, prompt_tokens):
                claim.gap_ms = self._now_ms - claim.ended_ms
                if self.watcher is not None:
                    self.watcher.returned(claim.group, self._now_ms - claim.since_ms)
        claim.prompt_tokens = prompt_tokens
        claim.turns += 1
        for run in list(claim.runs.values()):
            self._disclaim(run)
        self._follow(claim, known)

    def _goes_on(self, claim: Claim, matched_tokens: int, prompt_tokens: int) -> bool:
        """Whether this prompt continues the last one, rather than being a side call or a new beginning: half of that
        one is its beginning. Where the last one's blocks have left, the length has to do."""
        if 2 * matched_tokens >= claim.prompt_tokens:
            return True
        block_tokens = self._tree.block_bytes // TOKEN_BYTES
        is_there = any((run.start + run.length) * block_tokens > matched_tokens for run in claim.runs.values())
        return not is_there and 2 * prompt_tokens >= claim.prompt_tokens

    def let_go(self, hold: Hold, conversation: str, length: int) -> None:
        """A request of `conversation`, "" if it named none, lets go of its path.

        `length`: its tokens, with the answer's. Called behind the tree's release, so the path ends where a run does.
        """
        claim = self._claims.get(conversation)
        if claim is None:
            claim = self._make(None)
            self._restart(claim)
        else:
            claim.output_tokens = max(0, length - claim.prompt_tokens)
        run = hold.run
        while run.parent is not None:
            self._disclaim(run)
            run.claim = claim
            claim.runs[run.number] = run
            self._set(run, claim.value)
            run = run.parent
        self._await_next(claim)

    def changed(self, known: Conversation) -> None:
        """A request of it is over, or the edge told something of it."""
        claim = self._claims.get(known.id)
        if claim is not None:
            self._follow(claim, known)

    def forgotten(self, conversation: str) -> None:
        """The registry has no room for it: its blocks are nobody's."""
        claim = self._claims.pop(conversation, None)
        if claim is not None:
            self._count(claim)
            claim.due_ms = None
            for run in list(claim.runs.values()):
                self._disclaim(run)
            self._broods.leave(claim)

    # How claims follow.

    def _make(self, known: Conversation | None) -> Claim:
        self._made += 1
        return Claim(self._made, known, counted_ms=self._now_ms)

    def _follow(self, claim: Claim, known: Conversation) -> None:
        """Bring it, and its parent, up to what the registry knows now."""
        was_in_flight = claim.in_flight
        self._broods.follow(claim, known.parent, in_flight=known.is_in_flight)
        parent = self._claims.get(known.parent) if known.parent is not None else None
        if claim.in_flight:
            claim.due_ms = None
            self._revalue(claim)
        elif was_in_flight:
            claim.ended_ms = claim.counted_ms = self._now_ms
            self._restart(claim)
            if parent is not None and not parent.in_flight:
                self._restart(parent)
        else:
            self._classify(claim)
        if parent is not None:
            self._classify(parent)

    def _restart(self, claim: Claim) -> None:
        """Its age counts from now on."""
        self._count(claim)
        claim.since_ms = claim.counted_ms = self._now_ms
        claim.bucket = 0
        claim.due_ms = None
        self._classify(claim)
        self._await_next(claim)

    def _classify(self, claim: Claim) -> None:
        known = claim.known
        if claim.in_flight:
            return
        if known is not None:
            group = class_of(self.features(claim, known))
            if group != claim.group:
                self._count(claim)
                claim.group = group
        self._revalue(claim)

    def features(self, claim: Claim, known: Conversation) -> Features:
        return Features(
            final=known.final,
            stop=known.stop_reason,
            is_child=known.parent is not None,
            turns=claim.turns,
            children=self._broods.of(known.id),
            output_tokens=claim.output_tokens,
            gap_ms=claim.gap_ms,
        )

    def _count(self, claim: Claim) -> None:
        """Tell of its idle time so far."""
        if not claim.in_flight and claim.counted_ms < self._now_ms:
            if self.watcher is not None and claim.known is not None and claim.turns:
                since_ms = claim.since_ms
                self.watcher.idled(claim.group, claim.counted_ms - since_ms, self._now_ms - since_ms)
            claim.counted_ms = self._now_ms

    def _await_next(self, claim: Claim) -> None:
        """It is to be looked at when it enters the next bucket, if that changes anything."""
        if claim.in_flight or claim.due_ms is not None or not claim.runs or claim.bucket + 1 == NUM_BUCKETS:
            return
        claim.due_ms = claim.since_ms + EDGES_MS[claim.bucket + 1]
        heapq.heappush(self._due, (claim.due_ms, claim.number, claim))

    # What runs are worth.

    def all_claims(self) -> list[Claim]:
        """Those of requests that named no conversation are known by their runs alone."""
        nameless = {run.claim.number: run.claim for run in self._tree.runs() if run.claim and not run.claim.known}
        return [*self._claims.values(), *nameless.values()]

    def _revalue_all(self) -> None:
        for claim in self.all_claims():
            self._revalue(claim)

    def _revalue(self, claim: Claim) -> None:
        if not self.is_active:
            value = 0
        elif claim.in_flight:
            value = IN_FLIGHT
        else:
            value = self.tables.value(claim.group, claim.bucket)
        if value != claim.value:
            claim.value = value
            for run in claim.runs.values():
                self._set(run, value)

    def _set(self, run: Run, value: int) -> None:
        if run.value != value:
            run.value = value
            self._tree.enqueue(run)

    def _disclaim(self, run: Run) -> None:
        if run.claim is not None:
            del run.claim.runs[run.number]
            run.claim = None
            self._set(run, ABANDONED)

    def check(self) -> None:
        """Runs and claims name each other, and values are what they should be."""
        for run in self._tree.runs():
            claim = run.claim
            if claim is None:
                assert run.value == ABANDONED, "a run of nobody's that is worth something"
                continue
            assert claim.runs[run.number] is run, "a run that its claim does not know"
            assert run.value == claim.value, "a run that is worth something else than its claim"
        for claim in self._claims.values():
            assert claim.known is not None, "a claim of nobody's that is registered"
            assert claim.in_flight == claim.known.is_in_flight, "a claim that lags behind"
            assert all(self._tree.find_run(number) is run for number, run in claim.runs.items()), "a run that is gone"
            if claim.in_flight:
                continue
            assert claim.group == class_of(self.features(claim, claim.known)), "a claim in another class"
            assert claim.bucket <= bucket_of(self._now_ms - claim.since_ms), "a claim in the bucket of an older one"
            if claim.runs and self.is_active:
                assert claim.bucket == bucket_of(self._now_ms - claim.since_ms), "a claim in another bucket"
                assert claim.value == self.tables.value(claim.group, claim.bucket), "a claim at another value"
        self._broods.check(self._claims.values())
