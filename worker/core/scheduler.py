"""Rank 0's scheduler: which requests run, and what of each is in the next step.

Every step decodes all that decode, and shares what is left of `max_num_tokens` among tenants alike: each spends it on
its prefill chunks, oldest first, and then on what is admitted of it, in turns (`waiting`). So decode never waits for
prefill, a long prompt never blocks a step for long, and one tenant's prompts do not hold up another's. What is admitted
holds its match before any page is taken. Pages are taken oldest first; where none is left the youngest request is
suspended: released, and admitted again later as a prefill that mostly hits. The oldest never is, and a request is
admitted only if those that run keep the pages that they are going to need, so work is seldom thrown away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from worker.core import plan as plans
from worker.core.admission import Admission, Place
from worker.core.arrays import alike
from worker.core.config import RetentionPolicy, SchedulerConfig
from worker.core.conversations import News, StopReason
from worker.core.ghosts import Ghosts
from worker.core.live import Live, Stage
from worker.core.outputs import (
    Failed,
    Finished,
    HandoffReady,
    KvArrived,
    LoadSnapshot,
    Output,
    Rejection,
    Started,
    TokenOut,
)
from worker.core.plan import AnyAct, Plan
from worker.core.replica import Replica
from worker.core.returns import tables
from worker.core.returns.learner import Learner
from worker.core.shares import Want, share_out
from worker.core.step_work import StepWork
from worker.core.tiers import Tier
from worker.core.types import FinishReason, Phase, Request, RequestKey, Sampled
from worker.core.waiting import Waiting

_age = attrgetter("age")
LOOKAHEAD = 32
"""Queued requests that a step looks at behind one that waits for a sibling's prefill."""


class Scheduler:
    """Owns the queue and every live request. `plan` acts on `replica` as it decides; nobody else may."""

    def __init__(
        self,
        config: SchedulerConfig,
        replica: Replica,
        source_of: Callable[[Request], bytes],
        ghosts: Ghosts | None = None,
    ) -> None:
        """`source_of`: a generation leg's session reference, as its pull needs it. `ghosts`: watch, and may make the
        policy fall back."""
        self._config = config
        self._replica = replica
        self._source_of = source_of
        self._ghosts = ghosts
        self._admission = Admission(replica)
        self._block = replica.config.tokens_per_block
        self._capacity = replica.config.num_pages * self._block
        self._live: dict[RequestKey, Live] = {}
        self._waiting = Waiting(config.max_queued_requests)
        self._ages = 0
        self._number = 0
        self._acts: list[AnyAct] = []
        self._due: list[AnyAct] = []
        self._stalled = False
        self._told: list[Output] = []
        self._last_plan_ms = 0
        self._learner = Learner()
        if replica.index is not None:
            replica.index.watcher = self._learner

    @property
    def max_context_length(self) -> int:
        """Tokens that one request can have here, prompt and answer together."""
        return self._capacity

    def submit(self, request: Request) -> Rejection | None:
        """Queue it; a value where it can never run, or not now. Its answer ends where the pages do.

        A generation leg whose first token is its last is over at once: there is nothing to pull.
        """
        prompt = len(request.token_ids)
        refusal = self._admission.refusal(prompt) or self._waiting.refusal(request.tenant)
        if refusal is not None:
            return refusal
        # The last token of an answer needs no page: it is not fed again.
        room = self._capacity - prompt + request.resumed_tokens + 1
        if request.stopping.max_tokens > room:
            request = replace(request, stopping=replace(request.stopping, max_tokens=room))
        live = Live(request)
        self._stalled = False
        ending = live.ending() if live.pulls else None
        if ending is not None:
            self._told += [Started(request.key, 0), KvArrived(request.key), Finished(request.key, *ending)]
            return None
        self._live[request.key] = live
        self._waiting.add(live, self._number)
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
        self._due += self._arrived(live)

    def _arrived(self, live: Live) -> tuple[AnyAct, ...]:
        """All that it pulls is here; the acts by which every rank knows."""
        key, first = live.request.key, live.request.first_token
        assert first is not None
        self._told.append(KvArrived(key))
        live.stage = Stage.DECODING
        return plans.Arrived(key), plans.Sampled((key,), (first,))

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

    def heard(self, conversation: str, news: News, reason: StopReason = StopReason.UNKNOWN, *, final: bool) -> None:
        """What the edge told of a conversation; every rank records it with the next plan."""
        self._due.append(plans.Heard(conversation, news, reason, final))

    def returned(self, conversation: str, turn: str) -> None:
        """Another worker served a turn of this conversation: its finished children may be demoted."""
        self._due.append(plans.Returned(conversation, turn))

    def copied(self, number: int, good: int) -> None:
        """Copy `number` between tiers is over on every rank; its first `good` pages arrived on all of them."""
        self._due.append(plans.Copied(number, good))

    def tier_failed(self, tier: Tier) -> None:
        """Some rank cannot use this tier: nobody does from the next plan on."""
        self._due.append(plans.Off(tier))

    def clear(self, scope: bytes | None = None, owners: tuple[str, ...] | None = None) -> None:
        """Drop what no request holds, with the next plan: everything, or what is of one scope or of these owners."""
        self._due.append(plans.Clear(scope, owners))

    def switch(self, policy: RetentionPolicy) -> None:
        """Keep blocks by this policy from the next plan on: the configured one, or `lru`."""
        self._due.append(plans.Switch(policy))

    @property
    def next_wake_ms(self) -> int | None:
        """When there is something to do even if nothing happens: the first pin that expires, the next idle plan."""
        wakes = [live.pinned_until_ms for live in self._live.values() if live.stage is Stage.PINNED]
        if self._ticks:
            wakes.append(self._last_plan_ms + self._config.idle_step_ms)
        return min(wakes, default=None)

    @property
    def _ticks(self) -> bool:
        """Some child is still too young to be demoted: plans go on without work, as its age is counted in them."""
        config, last = self._replica.config, self._replica.conversations.last_child_step
        if config.finished_subagent_priority is None or last is None:
            return False
        return self._number < last + config.finished_subagent_min_idle_iterations

    @property
    def load(self) -> LoadSnapshot:
        cache = self._replica.cache
        return LoadSnapshot(
            running=sum(live.is_running for live in self._live.values()),
            queued=len(self._waiting),
            queued_tokens=self._waiting.tokens,
            used_pages=cache.num_in_use,
            total_pages=self._replica.config.num_pages,
            suspended=self._waiting.suspended,
        )

    def plan(self, now_ms: int) -> tuple[Plan, StepWork] | None:
        """The next step, already carried out on rank 0's own replica. None: there is nothing to do.

        A step without a batch still travels: its acts and what it tells count. After one that could do nothing at all,
        for want of pages, None until something happens, or until an idle plan is due.
        """
        for live in list(self._live.values()):
            if live.stage is Stage.PINNED and live.pinned_until_ms <= now_ms:
                self._forget(live)
        if self._due or self._told:
            self._stalled = False
        if (self._stalled or not self._has_work()) and not self._tick_is_due(now_ms):
            return None
        self._number += 1
        self._last_plan_ms = now_ms
        self._acts = []
        self._begin(now_ms)
        due, self._due = self._due, []
        for act in due:
            self._act(act)
            if isinstance(act, plans.Copied | plans.Off):
                self._refill()
        by_age = sorted(self._live.values(), key=_age)
        for live in by_age:
            if live.stage is Stage.LOADING:
                self._end_loading(live)
        sequences = self._replica.sequences
        running = [live for live in by_age if live.may_step and sequences[live.request.key].tokens_left]
        shares = self._shares(running)
        for live, count in shares:
            if count and live.stage is Stage.PREFILL and live.returns:
                live.returns = False
                self._act(plans.Return(live.request.key))
        to_compute = {live.request.key: count for live, count in shares if count}
        # The youngest makes way: whoever is in this step's forward already must be older than those that still ask.
        stepping = [
            live for live in self._live.values() if live.stage is Stage.LOADING or live.request.key in to_compute
        ]
        for live in sorted(stepping, key=_age):
            if live.stage is Stage.LOADING:
                self._load(live)
            elif live.may_step:
                self._compute(live, to_compute[live.request.key], now_ms)
        work = self._replica.finish()
        self._stalled = not (self._acts or self._told or work.copies)
        return Plan(self._number, now_ms, tuple(self._acts)), work

    def _begin(self, now_ms: int) -> None:
        """Open the plan; now and then it tells the ranks what rank 0 knows by now of who comes back."""
        self._replica.begin(self._number, now_ms)
        if self._ghosts is not None:
            self._ghosts.begin(self._number)
        index = self._replica.index
        if index is not None and self._number % self._config.learning_plans == 0:
            self._act(plans.Learned(*tables.packed(self._learner.rows(index.idle()))))

    def _shares(self, running: list[Live]) -> list[tuple[Live, int]]:
        """Who is in the step with how many tokens: `running`, which come by age and have some to compute, and whoever
        is admitted with it."""
        budget, sequences = self._config.max_num_tokens, self._replica.sequences
        wanted = [Want(live.request.tenant, sequences[live.request.key].tokens_left) for live in running]
        waiting = self._waiting.wants()
        counts, allowed = share_out(budget, wanted, waiting)
        shares = [*zip(running, counts, strict=True)]
        if waiting:
            shares += self._admit(allowed, self._admission.reserve(self._live.values()))
        spare = budget - sum(count for _, count in shares)
        if not spare or not waiting:
            return shares
        # What was kept for those that could not begin, or found much of their prompts cached.
        left = [
            Want(
                live.request.tenant,
                sequences[live.request.key].tokens_left - count if live.stage is Stage.PREFILL else 0,
            )
            for live, count in shares
        ]
        more, _ = share_out(spare, left, {})
        return [(live, count + extra) for (live, count), extra in zip(shares, more, strict=True)]

    def _tick_is_due(self, now_ms: int) -> bool:
        return self._ticks and now_ms >= self._last_plan_ms + self._config.idle_step_ms

    def _has_work(self) -> bool:
        works = (Stage.PREFILL, Stage.DECODING, Stage.LOADING)
        return bool(self._due or self._told or len(self._waiting)) or any(
            one.stage in works for one in self._live.values()
        )

    def _act(self, act: AnyAct) -> bool:
        done = self._replica.act(act)
        if done:
            self._acts.append(act)
        return done

    def _compute(self, live: Live, count: int, now_ms: int) -> None:
        """Put `count` tokens of `live` into the step, fewer where pages lack; suspends the youngest if none is left."""
        key = live.request.key
        sequence = self._replica.sequences[key]
        while True:
            fitting = (sequence.pages.size + self._replica.cache.num_available) * self._block - sequence.computed
            if fitting > 0:
                break
            if not self._suspend_younger(live):
                return
        left = sequence.tokens_left
        count = min(count, fitting)
        done = self._act(plans.Chunk(key, count, count == left))
        assert done, "a chunk was cut to the pages that there are"
        if count < left:
            return
        live.stage = Stage.DECODING
        if live.request.phase is Phase.CONTEXT:
            self._act(plans.Pin(key))
            live.stage = Stage.PINNED
            live.pinned_until_ms = now_ms + self._config.handoff_timeout_ms

    def _suspend_younger(self, live: Live) -> bool:
        """The youngest of those whose pages can be taken back makes way, unless that is `live` itself."""
        may_go = (Stage.PREFILL, Stage.DECODING, Stage.LOADING)
        victim = max((one for one in self._live.values() if one.stage in may_go), key=_age)
        if victim is not live:
            self._suspend(victim)
        return victim is not live

    def _end_loading(self, live: Live) -> None:
        """It goes on once all that it found is readable and, where it pulls, all its pages are there."""
        key = live.request.key
        cache, sequence = self._replica.cache, self._replica.sequences[key]
        if sequence.loading:
            if not cache.is_loaded(sequence.hold):
                return
            self._act(plans.Loaded(key))
        if not live.announced:
            live.announced = True
            live.cached_tokens = sequence.base
            self._told.append(Started(key, sequence.base))
        if not live.pulls:
            live.stage = Stage.PREFILL
        elif not sequence.pages_needed(sequence.length, self._block):
            self._begin_pull(live)

    def _load(self, live: Live) -> None:
        """More of what it waits for, as much as this plan may move."""
        key = live.request.key
        cache, sequence = self._replica.cache, self._replica.sequences[key]
        pools = cache.pools
        num_cold = cache.num_cold(sequence.hold) if sequence.loading else 0
        needed = num_cold if sequence.loading else sequence.pages_needed(sequence.length, self._block)
        while needed and not cache.num_available:
            if not self._suspend_younger(live):
                return
        if num_cold:
            count = min(num_cold, pools.onboard_left, cache.num_available)
            if count:
                self._act(plans.Load(key, count))
        elif not sequence.loading:
            count = min(needed, pools.offload_left + len(pools.free[Tier.DEVICE]), cache.num_available)
            if count:
                self._act(plans.Gather(key, count))
            if count == needed:
                self._end_loading(live)

    def _refill(self) -> None:
        """Whoever lost blocks that it waited for computes them from its tokens."""
        for live in self._live.values():
            if live.stage is Stage.LOADING:
                sequence = self._replica.sequences[live.request.key]
                if sequence.computed < sequence.base:
                    lost = live.tokens[sequence.computed : sequence.base]
                    self._act(plans.Refill(live.request.key, plans.pack(lost)))

    def _suspend(self, live: Live) -> None:
        self._act(plans.Suspend(live.request.key))
        live.stage = Stage.QUEUED
        self._waiting.put_back(live)

    def _admit(self, allowed: dict[bytes, int], reserve: int) -> list[tuple[Live, int]]:
        """Those that waited and begin with this step, in the order that is due, and the tokens of their first chunks:
        of a tenant as many as are `allowed`.

        They hold their matches from here on; the caller takes their pages, which there are: `reserve` was kept.
        """
        slots = min(self._config.max_batch_size, self._config.max_num_tokens)
        running = Counter(live.request.tenant for live in self._live.values() if live.is_running)
        slots -= running.total()
        admitted: list[tuple[Live, int]] = []
        waiting = 0
        spent: set[bytes] = set()
        if slots == 0:
            return admitted
        for live in self._waiting.order(spent):
            tenant = live.request.tenant
            has_place = self._waiting.has_place(live, running[tenant], slots, self._number)
            if not has_place or (not allowed[tenant] and not live.pulls):
                spent.add(tenant)
                continue
            room = self._replica.cache.num_available - reserve
            place = self._admission.place(live, room)
            if self._admission.sibling_is_ahead(live, place, self._live.values()):
                waiting += 1
                if waiting == LOOKAHEAD:
                    break
                continue
            if place.cost > room or (live.started and not self._may_resume(place.cost)):
                break
            self._waiting.begin(live, len(place.tokens) - place.match.blocks * self._block)
            count = self._hold(live, place, allowed[tenant])
            reserve += -(-len(place.tokens) // self._block) - place.match.blocks + place.num_cold
            allowed[tenant] -= count
            admitted.append((live, count))
            running[tenant] += 1
            slots -= 1
            if slots == 0:
                break
        return admitted

    def _may_resume(self, cost: int) -> bool:
        return self._admission.may_resume(cost, self._live.values(), self._config.max_util_for_resume)

    def _hold(self, live: Live, place: Place, budget: int) -> int:
        """Admit `live` behind its match; returns the tokens of its first chunk, 0 where it has to wait for pages."""
        request = live.request
        act = self._admission.act(live, place)
        self._act(act)
        if not live.started:
            self._ages += 1
            live.age = self._ages
            if self._ghosts is not None and act.prefills:
                wanted = self._ghosts.admitted(request, place.tokens, act.matched)
                if wanted is not None:
                    self.switch(wanted)
        live.started = True
        sequence = self._replica.sequences[request.key]
        live.returns |= sequence.returns
        if sequence.loading or live.pulls:
            live.stage = Stage.LOADING
            if not sequence.loading:
                self._end_loading(live)
            return 0
        live.stage = Stage.PREFILL
        if not live.announced:
            live.announced = True
            live.cached_tokens = place.match.blocks * self._block
            self._told.append(Started(request.key, live.cached_tokens))
        return min(sequence.tokens_left, budget)

    def _begin_pull(self, live: Live) -> None:
        key = live.request.key
        live.stage = Stage.PULLING
        live.pulled = True
        self._act(plans.Pull(key, self._source_of(live.request)))
        sequence = self._replica.sequences[key]
        if sequence.pages.size == sequence.committed:
            # At once: it may have to make way in this very plan.
            for act in self._arrived(live):
                self._act(act)

    def complete(self, plan: Plan, sampled: Sampled) -> list[Output]:
        """What the step tells, now that its tokens are known. They travel to the other ranks with the next plan.

        Several of one request follow each other; those behind its end are ignored.
        """
        told, self._told = self._told, []
        keys: list[RequestKey] = []
        tokens: list[int] = []
        for key, start, stop in alike(sampled.requests):
            live = self._live.get(key)
            if live is None:
                continue
            token = sampled.token_ids[start]
            logprobs = sampled.logprobs.get(key)
            if stop > start + 1:
                *before, token = live.of_answer(sampled.token_ids[start:stop])
                live.output += before
                self._waiting.generated(live, len(before))
                told += [TokenOut(key, one, logprobs) for one in before]
                keys += [key] * len(before)
                tokens += before
            live.output.append(token)
            self._waiting.generated(live, 1)
            ending = live.ending()
            if ending is None and live.stage is Stage.PINNED:
                prompt = len(live.request.token_ids)
                told.append(HandoffReady(key, token, logprobs, live.cached_tokens, prompt))
                continue
            told.append(TokenOut(key, token, logprobs))
            if ending is None:
                keys.append(key)
                tokens.append(token)
            else:
                told.append(Finished(key, *ending))
                self._forget(live)
        if keys:
            self._due.insert(0, plans.Sampled(tuple(keys), tuple(tokens)))
        return told

    def _end(self, live: Live) -> None:
        """The outside is done with it; a pull's pages are given back only when nobody writes into them."""
        if live.stage is Stage.PULLING:
            live.stage = Stage.DOOMED
        else:
            self._forget(live)

    def _forget(self, live: Live) -> None:
        del self._live[live.request.key]
        self._let_go_ghosts(live)
        if live.stage is Stage.QUEUED:
            self._waiting.drop(live)
            if live.started and live.request.conversation:
                self._due.append(plans.Abandon(live.request.conversation))
        else:
            self._due.append(plans.Release(live.request.key))

    def _let_go_ghosts(self, live: Live) -> None:
        if self._ghosts is not None and live.started and live.request.phase is not Phase.GENERATION:
            sequence = self._replica.sequences.get(live.request.key)
            computed = sequence.computed if sequence is not None else len(live.request.token_ids)
            self._ghosts.let_go(live.request, live.tokens[:computed])
