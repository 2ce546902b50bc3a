"""Rank 0's scheduler: which requests run, and what of each is in the next step.

Every step decodes all that decode, then spends what is left of `max_num_tokens` on prefill chunks, oldest first, then
admits from the queue in order. So decode never waits for prefill, and a long prompt never blocks a step for long. When
no page is left the youngest request is suspended: released, and admitted again later as a prefill that mostly hits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from worker.core import plan as plans
from worker.core.live import Live, Stage
from worker.core.outputs import (
    Failed,
    Finished,
    HandoffReady,
    KvArrived,
    LoadSnapshot,
    Output,
    Started,
    TokenOut,
)
from worker.core.plan import AnyAct, Plan
from worker.core.replica import Replica, StepWork
from worker.core.runs import Match
from worker.core.types import FinishReason, Phase, Request, RequestKey, Sampled, TokenIds

LOOKAHEAD = 32
"""Queued requests that a step looks at behind one that waits for a sibling's prefill."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`commit_replies`: blocks of generated tokens are reusable too. `handoff_timeout_ms`: how long a pin lasts."""

    max_batch_size: int = 64
    max_num_tokens: int = 2048
    max_queued_requests: int = 1024
    handoff_timeout_ms: int = 60_000
    commit_replies: bool = True


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not taken; `code` is OpenEngine's ErrorCode without its prefix."""

    code: str
    message: str
    retryable: bool


class Scheduler:
    """Owns the queue and every live request. `plan` acts on `replica` as it decides; nobody else may."""

    def __init__(self, config: SchedulerConfig, replica: Replica, source_of: Callable[[Request], bytes]) -> None:
        """`source_of`: a generation leg's session reference, as its pull needs it."""
        self._config = config
        self._replica = replica
        self._source_of = source_of
        self._block = replica.config.tokens_per_block
        self._capacity = replica.config.num_pages * self._block
        self._live: dict[RequestKey, Live] = {}
        self._queue: list[Live] = []
        self._ages = 0
        self._number = 0
        self._acts: list[AnyAct] = []
        self._due: list[AnyAct] = []
        self._stalled = False
        self._told: list[Output] = []

    @property
    def max_context_length(self) -> int:
        """Tokens that one request can have here, prompt and answer together."""
        return self._capacity

    def submit(self, request: Request) -> Rejection | None:
        """Queue it; a value where it can never run, or not now. Its answer ends where the pages do."""
        prompt = len(request.token_ids)
        if prompt == 0:
            return Rejection("INVALID_ARGUMENT", "the prompt is empty", retryable=False)
        if prompt >= self._capacity:
            message = f"the prompt has {prompt} tokens and the cache holds {self._capacity}, one of them for the answer"
            return Rejection("INVALID_ARGUMENT", message, retryable=False)
        if len(self._queue) >= self._config.max_queued_requests:
            return Rejection("OVERLOADED", f"{len(self._queue)} requests are queued", retryable=True)
        room = self._capacity - prompt + request.resumed_tokens
        if request.stopping.max_tokens > room:
            request = replace(request, stopping=replace(request.stopping, max_tokens=room))
        self._ages += 1
        live = Live(request, self._ages)
        self._stalled = False
        self._live[request.key] = live
        self._queue.append(live)
        return None

    def cancel(self, key: RequestKey) -> None:
        """It ends with the next plan, a pin as well. Unknown keys are ignored: it may have ended meanwhile."""
        live = self._live.get(key)
        if live is None or live.stage is Stage.DOOMED:
            return
        if live.stage is not Stage.PINNED:
            self._told.append(Finished(key, FinishReason.CANCELLED))
        self._end(live)

    def pulled(self, key: RequestKey) -> None:
        """Every rank has all pages of this pull."""
        live = self._live.get(key)
        if live is None:
            return
        if live.stage is Stage.DOOMED:
            self._forget(live)
            return
        assert live.request.first_token is not None
        self._due += [plans.Arrived(key), plans.Sampled((key,), (live.request.first_token,))]
        self._told.append(KvArrived(key))
        live.stage = Stage.DECODING

    def pull_failed(self, key: RequestKey, why: str) -> None:
        """No rank writes into its pages any more, and some rank lacks some of them."""
        live = self._live.get(key)
        if live is None:
            return
        if live.stage is not Stage.DOOMED:
            self._told.append(Failed(key, "KV_TRANSFER_FAILED", why, retryable=True))
        self._forget(live)

    def released(self, key: RequestKey) -> None:
        """The generation side has a context leg's pages, or nobody will fetch them."""
        live = self._live.get(key)
        if live is not None and live.stage is Stage.PINNED:
            self._forget(live)

    def clear(self) -> None:
        """Drop what no request holds, with the next plan."""
        self._due.append(plans.Clear())

    @property
    def next_wake_ms(self) -> int | None:
        """When there is something to do even if nothing happens: the first pin that expires."""
        pins = [live.pinned_until_ms for live in self._live.values() if live.stage is Stage.PINNED]
        return min(pins, default=None)

    @property
    def load(self) -> LoadSnapshot:
        cache = self._replica.cache
        return LoadSnapshot(
            running=len(self._live) - len(self._queue),
            queued=len(self._queue),
            queued_tokens=sum(len(live.request.token_ids) for live in self._queue),
            used_pages=cache.num_in_use,
            total_pages=self._replica.config.num_pages,
        )

    def plan(self, now_ms: int) -> tuple[Plan, StepWork] | None:
        """The next step, already carried out on rank 0's own replica. None: there is nothing to do.

        A step without a batch still travels: its acts and what it tells count. After one that could do nothing at all,
        for want of pages, None until something happens.
        """
        for live in list(self._live.values()):
            if live.stage is Stage.PINNED and live.pinned_until_ms <= now_ms:
                self._forget(live)
        if self._due or self._told:
            self._stalled = False
        if self._stalled or not self._has_work():
            return None
        self._number += 1
        self._acts = []
        self._replica.begin(self._number)
        due, self._due = self._due, []
        for act in due:
            self._act(act)
        budget = self._config.max_num_tokens
        running = sorted((live for live in self._live.values() if self._may_step(live)), key=lambda live: live.age)
        budget = self._decode([live for live in running if live.stage is Stage.DECODING], budget)
        for live in running:
            if live.stage is Stage.PREFILL and budget > 0:
                budget -= self._prefill(live, budget, now_ms)
        self._admit(budget, now_ms)
        work = self._replica.finish()
        self._stalled = not (self._acts or self._told)
        return Plan(self._number, now_ms, tuple(self._acts)), work

    def _has_work(self) -> bool:
        return bool(self._due or self._told or self._queue) or any(map(self._may_step, self._live.values()))

    @staticmethod
    def _may_step(live: Live) -> bool:
        return live.stage in (Stage.PREFILL, Stage.DECODING)

    def _act(self, act: AnyAct) -> bool:
        done = self._replica.act(act)
        if done:
            self._acts.append(act)
        return done

    def _decode(self, decoding: list[Live], budget: int) -> int:
        for live in decoding:
            if budget == 0:
                break
            if live.stage is Stage.DECODING and self._chunk_or_suspend(live, 1, sample=True):
                budget -= 1
        return budget

    def _prefill(self, live: Live, budget: int, now_ms: int) -> int:
        """One chunk; returns its tokens."""
        sequence = self._replica.sequences[live.request.key]
        left = sequence.length - sequence.computed
        count = min(left, budget)
        if not self._chunk_or_suspend(live, count, sample=count == left):
            return 0
        if count == left:
            live.stage = Stage.DECODING
            if live.request.phase is Phase.CONTEXT:
                self._act(plans.Pin(live.request.key))
                live.stage = Stage.PINNED
                live.pinned_until_ms = now_ms + self._config.handoff_timeout_ms
        return count

    def _chunk_or_suspend(self, live: Live, count: int, *, sample: bool) -> bool:
        """Put `count` tokens of `live` into the step; suspends the youngest until there are pages for them.

        False: there are none, and `live` waits or was suspended itself.
        """
        while not self._act(plans.Chunk(live.request.key, count, sample)):
            victims = [other for other in self._live.values() if self._may_step(other) and not self._in_step(other)]
            victim = max(victims, key=lambda other: other.age)
            oldest = min(victims, key=lambda other: other.age)
            if victim is oldest:
                return False
            self._suspend(victim)
            if victim is live:
                return False
        return True

    def _in_step(self, live: Live) -> bool:
        return self._replica.in_step(live.request.key)

    def _suspend(self, live: Live) -> None:
        self._act(plans.Release(live.request.key))
        live.stage = Stage.QUEUED
        self._queue.insert(0, live)
        self._queue.sort(key=lambda queued: queued.age)

    def _admit(self, budget: int, now_ms: int) -> None:
        waiting = 0
        for live in list(self._queue):
            full = self._num_running() >= self._config.max_batch_size
            if budget <= 0 or waiting == LOOKAHEAD or full:
                return
            tokens = live.tokens
            # Of a prompt that must yield logits, the last token is computed even where all of it is cached.
            matchable = len(live.request.token_ids) if live.pulls else len(tokens) - 1
            match = Match(None, 0, 0)
            if not live.request.bypass_prefix_cache:
                match = self._replica.cache.match(self._scope(live), tokens, matchable // self._block)
            if self._sibling_prefills(live, match, tokens):
                waiting += 1
                continue
            needed = -(-len(tokens) // self._block) - match.blocks
            if needed > self._replica.cache.num_available - self._newly_held(match):
                return
            self._queue.remove(live)
            budget -= self._start(live, match, budget, now_ms)

    def _num_running(self) -> int:
        return sum(live.stage is not Stage.QUEUED and live.stage is not Stage.PINNED for live in self._live.values())

    def _newly_held(self, match: Match) -> int:
        """Idle pages of the matched path: they stop being available once it is held."""
        run, length, idle = match.run, match.length, 0
        while run is not None:
            protected = run.length if run.held_below else run.longest_hold
            idle += max(0, length - protected)
            run = run.parent
            length = run.length if run is not None else 0
        return idle

    def _sibling_prefills(self, live: Live, match: Match, tokens: TokenIds) -> bool:
        """Whether a prefill, or this very step, is about to commit the block that `live` would compute next."""
        if not self._replica.config.enable_block_reuse or live.request.bypass_prefix_cache:
            return False
        start = match.blocks * self._block
        block = tokens[start : start + self._block]
        if len(block) < self._block:
            return False
        scope = self._scope(live)
        for other in self._live.values():
            if other.stage is not Stage.PREFILL and not self._in_step(other):
                continue
            if self._scope(other) != scope or other.request.bypass_prefix_cache:
                continue
            sequence = self._replica.sequences[other.request.key]
            if sequence.committed != match.blocks or sequence.length < start + self._block:
                continue
            same_path = sequence.hold.length == match.length and (match.run is None or sequence.hold.run is match.run)
            if same_path and (sequence.token_slice(start, start + self._block) == block).all():
                return True
        return False

    def _start(self, live: Live, match: Match, budget: int, now_ms: int) -> int:
        """Admit `live` behind `match`, and its first chunk or its pull; returns the tokens of that chunk."""
        request = live.request
        tokens = live.tokens
        matched = match.blocks * self._block
        pulls = live.pulls
        own = request.token_ids if pulls else tokens
        until = self._capacity + 1 if self._config.commit_replies else len(request.token_ids)
        number = match.run.number if match.run is not None else 0
        self._act(
            plans.Admit(request.key, self._scope(live), number, match.length, matched, plans.pack(own[matched:]), until)
        )
        if not live.started:
            live.cached_tokens = matched
            self._told.append(Started(request.key, matched))
        live.started = True
        if pulls:
            self._begin_generation(live)
            return 0
        live.stage = Stage.PREFILL
        return self._prefill(live, budget, now_ms)

    def _begin_generation(self, live: Live) -> None:
        """Its first token was sampled elsewhere: it may already be the last one."""
        key = live.request.key
        live.stage = Stage.PULLING
        ending = live.ending()
        if ending is not None:
            self._told += [KvArrived(key), Finished(key, *ending)]
            self._forget(live)
            return
        taken = self._act(plans.Pull(key, self._source_of(live.request)))
        assert taken, "admission made sure of the pages"
        sequence = self._replica.sequences[key]
        if sequence.pages.size == sequence.committed:
            self.pulled(key)

    def _scope(self, live: Live) -> bytes:
        return live.request.salt

    def complete(self, plan: Plan, sampled: Sampled) -> list[Output]:
        """What the step tells, now that its tokens are known. They travel to the other ranks with the next plan."""
        told, self._told = self._told, []
        kept: list[tuple[RequestKey, int]] = []
        for key, token in zip(sampled.requests, sampled.token_ids, strict=True):
            live = self._live.get(key)
            if live is None:
                continue
            live.output.append(token)
            logprobs = sampled.logprobs.get(key)
            ending = live.ending()
            if ending is None and live.stage is Stage.PINNED:
                prompt = len(live.request.token_ids)
                told.append(HandoffReady(key, token, logprobs, live.cached_tokens, prompt))
                continue
            told.append(TokenOut(key, token, logprobs))
            if ending is None:
                kept.append((key, token))
            else:
                told.append(Finished(key, *ending))
                self._forget(live)
        if kept:
            keys, tokens = zip(*kept, strict=True)
            self._due.insert(0, plans.Sampled(keys, tokens))
        return told

    def _end(self, live: Live) -> None:
        """The outside is done with it; a pull's pages are given back only when nobody writes into them."""
        if live.stage is Stage.PULLING:
            live.stage = Stage.DOOMED
        else:
            self._forget(live)

    def _forget(self, live: Live) -> None:
        del self._live[live.request.key]
        if live.stage is Stage.QUEUED:
            self._queue.remove(live)
        else:
            self._due.append(plans.Release(live.request.key))
