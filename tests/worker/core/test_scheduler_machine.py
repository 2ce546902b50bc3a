"""Scheduler and replicas under random work, against the simplest model of what an engine must tell."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.core import checkpoint
from worker.core.config import CacheConfig, RetentionPolicy, ReusePolicy, SchedulerConfig
from worker.core.conversations import News, StopReason
from worker.core.outputs import Failed, Finished, HandoffReady, KvArrived, Output, Started, TokenOut
from worker.core.plan import decode, encode
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.step_work import PullWork
from worker.core.tiers import CopyWork, Tier
from worker.core.types import (
    Batch,
    FinishReason,
    Phase,
    Request,
    RequestKey,
    Retention,
    Sampled,
    Sampling,
    Stopping,
    TokenRange,
)

BLOCK = 2
NUM_PAGES = 12
TRUNKS = ([1, 2] * 12, [1, 2, 2, 1] * 6, [1, 2, 1, 2, 2, 2, 1, 1, 1, 1, 2, 2], [2, 1, 1] * 6)


def next_token(context: tuple[int, ...]) -> int:
    """A model whose next token depends on everything before it."""
    return (sum((at + 1) * token for at, token in enumerate(context)) * 7 + len(context)) % 8 + 1


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that share beginnings of every length, as a family's do."""
    trunk = draw(st.sampled_from(TRUNKS))
    return trunk[: draw(st.sampled_from([*range(1, 27), 8, 12, 16, 20, 26]))] + draw(
        st.lists(st.integers(1, 2), max_size=3)
    )


@dataclass
class Pending:
    """A copy that a rank has not carried out. `captured`: what the device's pages held when it was asked for."""

    work: CopyWork
    captured: list[list[tuple[int, ...] | None]] | None


@dataclass
class Memory:
    """A rank's pages: slot -> the whole context that its K and V were computed from; colder tiers by page."""

    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cold: dict[tuple[Tier, int], list[tuple[int, ...] | None] | None] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)

    def begin(self, copies: list[CopyWork]) -> None:
        for work in copies:
            captured = [self._page(page) for page in work.sources.tolist()] if work.source is Tier.DEVICE else None
            self.pending.append(Pending(work, captured))

    def _page(self, page: int) -> list[tuple[int, ...] | None]:
        return [self.slots.get(page * BLOCK + at) for at in range(BLOCK)]

    def carry_out(self, number: int, good: int) -> None:
        """Copy `number` ends, with everything before it that shares a cold page; `good` pages arrive at most."""
        chosen = next(one for one in self.pending if one.work.number == number)
        for one in list(self.pending):
            if one is not chosen and one.work.number < number and _share(one.work, chosen.work):
                self.carry_out(one.work.number, 1000)
        self.pending.remove(chosen)
        work = chosen.work
        arrived = 0
        for at, (source, target) in enumerate(zip(work.sources.tolist(), work.targets.tolist(), strict=True)):
            content = chosen.captured[at] if chosen.captured is not None else self.cold.get((work.source, source))
            is_good = content is not None and at < good and arrived == at
            arrived += is_good
            if work.target is not Tier.DEVICE:
                self.cold[work.target, target] = content if is_good else None
            elif is_good and content is not None:
                for offset, slot in enumerate(content):
                    assert slot is not None, "a page was moved before it was full"
                    self.slots[target * BLOCK + offset] = slot
            elif not is_good:
                for offset in range(BLOCK):
                    self.slots.pop(target * BLOCK + offset, None)
        self.ended[number] = arrived

    def forward(self, batch: Batch) -> dict[RequestKey, int]:
        """Writes each new token's slot from what the pages before it hold; returns what would be sampled."""
        answers: dict[int, int] = {}
        sources = [self.slots.get(source * BLOCK + at) for source, _ in batch.page_copies for at in range(BLOCK)]
        targets = [target * BLOCK + at for _, target in batch.page_copies for at in range(BLOCK)]
        self.slots |= {slot: content for slot, content in zip(targets, sources, strict=True) if content is not None}
        for row, (start, stop) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
            for at in range(start, stop):
                position = int(batch.positions[at])
                before: tuple[int, ...] = ()
                if position:
                    page, offset = divmod(position - 1, BLOCK)
                    before = self.slots[int(batch.page_table[row, page]) * BLOCK + offset]
                    assert len(before) == position, "a token was computed from somebody else's page"
                self.slots[int(batch.slots[at])] = (*before, int(batch.token_ids[at]))
            answers[stop - 1] = next_token(self.slots[int(batch.slots[stop - 1])])
        return {key: answers[int(at)] for key, at in zip(batch.sample_requests, batch.sample_rows, strict=True)}


def _share(one: CopyWork, other: CopyWork) -> bool:
    def pages(work: CopyWork) -> set[tuple[Tier, int]]:
        both = [(work.source, page) for page in work.sources.tolist()]
        both += [(work.target, page) for page in work.targets.tolist()]
        return {page for page in both if page[0] is not Tier.DEVICE}

    return bool(pages(one) & pages(other))


@dataclass
class Expected:
    """What the outside knows of one request."""

    request: Request
    answer: list[int] = field(default_factory=list)
    started: bool = False
    over: bool = False
    pinned: bool = False
    cancelled: bool = False
    cached: int = 0


class Engine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memories = (Memory(), Memory())
        self.expected: dict[RequestKey, Expected] = {}
        self.pulls: dict[RequestKey, PullWork] = {}
        self.pins: dict[RequestKey, list[int]] = {}
        self.requests: dict[RequestKey, Request] = {}
        self.now_ms = 0
        self.keys = 0

    @initialize(
        policy=st.sampled_from(ReusePolicy),
        reuse=st.sampled_from([True, True, True, False]),
        partial=st.booleans(),
        host=st.sampled_from([0, 1, 4, 8]),
        disk=st.sampled_from([0, 0, 3, 10]),
        rate=st.sampled_from([1, 3, 64]),
        indexed=st.booleans(),
    )
    def configure(
        self, policy: ReusePolicy, reuse: bool, partial: bool, host: int, disk: int, rate: int, indexed: bool
    ) -> None:
        indexed = indexed and policy is ReusePolicy.PER_CONVERSATION
        config = CacheConfig(
            num_pages=NUM_PAGES,
            tokens_per_block=BLOCK,
            enable_block_reuse=reuse,
            enable_partial_reuse=partial,
            policy=policy,
            max_tracked_conversations=3,
            num_host_pages=host,
            num_disk_pages=disk,
            finished_subagent_priority=1 if policy is ReusePolicy.PER_CONVERSATION else None,
            finished_subagent_min_idle_iterations=2,
            max_offload_pages_per_plan=rate,
            max_onboard_pages_per_plan=rate,
            retention_policy=RetentionPolicy.RETURN_INDEX if indexed else RetentionPolicy.SUBAGENT,
            tells_events=True,
        )
        self.replica = Replica(config)
        self.follower = Replica(config)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=4, max_num_tokens=6, handoff_timeout_ms=50, max_queued_requests=6, learning_plans=5
            ),
            self.replica,
            lambda request: str(request.key).encode(),
        )

    @rule(
        prompt=prompts(),
        phase=st.sampled_from(Phase),
        max_tokens=st.sampled_from([1, 2, 5, 12, 24]),
        stops=st.sampled_from([frozenset({4}), frozenset[int]()]),
        salt=st.sampled_from([b"", b"s"]),
        bypass=st.booleans(),
        lineage=st.sampled_from([("", None), ("a", None), ("b", "a"), ("c", "b"), ("a", "c"), ("d", "z"), ("e", "a")]),
        turn=st.sampled_from(["", "1", "2"]),
        priority=st.sampled_from([None, None, 0, 29, 30, 80]),
        duration_ms=st.sampled_from([0, 20]),
        tenant=st.sampled_from([b"", b"one", b"two"]),
    )
    def submit(
        self,
        prompt: list[int],
        phase: Phase,
        max_tokens: int,
        stops: frozenset[int],
        salt: bytes,
        bypass: bool,
        lineage: tuple[str, str | None],
        turn: str,
        priority: int | None,
        duration_ms: int,
        tenant: bytes,
    ) -> None:
        self.keys += 1
        key = RequestKey(self.keys)
        first = next_token(tuple(prompt)) if phase is Phase.GENERATION else None
        request = Request(
            key=key,
            phase=phase,
            token_ids=np.array(prompt, np.int32),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens, 0, stops),
            salt=salt,
            bypass_prefix_cache=bypass,
            conversation=lineage[0],
            parent=lineage[1],
            turn=turn,
            retention=None if priority is None else Retention((TokenRange(0, None, priority, duration_ms),), priority),
            first_token=first,
            tenant=tenant,
        )
        self.requests[key] = request
        rejection = self.scheduler.submit(request)
        if len(prompt) > NUM_PAGES * BLOCK:
            assert rejection is not None
            assert not rejection.retryable
        elif rejection is None:
            self.expected[key] = Expected(request, [] if first is None else [first])
        else:
            assert (rejection.code, rejection.retryable) == ("OVERLOADED", True)

    @rule(data=st.data())
    @precondition(lambda self: self.expected)
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        self.scheduler.cancel(key)
        expected = self.expected[key]
        expected.cancelled = True
        if expected.pinned:
            expected.pinned = False
            del self.expected[key]

    @rule(data=st.data(), fails=st.booleans())
    @precondition(lambda self: self.pulls)
    def pull_ends(self, data: st.DataObject, fails: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.pulls)))
        work = self.pulls.pop(key)
        if fails:
            self.scheduler.pull_failed(key, "the source is gone")
            return
        tokens = self.requests[key].token_ids.tolist()
        for memory in self.memories:
            for at in range(work.first_block * BLOCK, len(tokens)):
                slot = int(work.pages[at // BLOCK - work.first_block]) * BLOCK + at % BLOCK
                memory.slots[slot] = tuple(tokens[: at + 1])
        self.scheduler.pulled(key)

    @rule(data=st.data())
    @precondition(lambda self: any(expected.pinned for expected in self.expected.values()))
    def fetched(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, expected in self.expected.items() if expected.pinned)))
        self.scheduler.released(key)
        del self.expected[key]

    @rule(
        conversation=st.sampled_from("abcd"),
        news=st.sampled_from([News.GENERATING, News.ENDED, News.ENDED, News.CLOSED]),
        final=st.booleans(),
    )
    def hear_of(self, conversation: str, news: News, final: bool) -> None:
        self.scheduler.heard(conversation, news, StopReason.TOOL_CALL, final=final)

    @rule(which=st.sampled_from(["all", "scope", "owners"]), chance=st.integers(0, 7))
    @precondition(lambda self: self.expected)
    def clear(self, which: str, chance: int) -> None:
        if chance:
            return
        self.scheduler.clear(b"s" if which == "scope" else None, ("a", "b") if which == "owners" else None)

    @rule(conversation=st.sampled_from("abz"), turn=st.sampled_from(["", "1", "3"]))
    def return_elsewhere(self, conversation: str, turn: str) -> None:
        self.scheduler.returned(conversation, turn)

    @rule(falls_back=st.booleans())
    def switch_policy(self, falls_back: bool) -> None:
        self.scheduler.switch(RetentionPolicy.LRU if falls_back else self.replica.config.retention_policy)

    @rule(data=st.data(), rank=st.integers(0, 1), good=st.sampled_from([1000] * 9 + [0, 1]))
    @precondition(lambda self: any(memory.pending for memory in self.memories))
    def copy_ends(self, data: st.DataObject, rank: int, good: int) -> None:
        memory = self.memories[rank]
        if memory.pending:
            memory.carry_out(data.draw(st.sampled_from([one.work.number for one in memory.pending])), good)
            self.report_copies()

    @rule(tier=st.sampled_from([Tier.HOST, Tier.DISK]), chance=st.integers(0, 30))
    @precondition(lambda self: self.expected)
    def tier_fails(self, tier: Tier, chance: int) -> None:
        if chance == 0:
            self.scheduler.tier_failed(tier)

    def carry_out_copies(self) -> None:
        for memory in self.memories:
            while memory.pending:
                memory.carry_out(memory.pending[0].work.number, 1000)
        self.report_copies()

    @rule()
    def replace_the_follower_by_its_checkpoint(self) -> None:
        self.follower = checkpoint.load(self.follower.config, checkpoint.save(self.follower))

    def report_copies(self) -> None:
        for number in sorted(self.memories[0].ended.keys() & self.memories[1].ended.keys()):
            self.scheduler.copied(number, min(memory.ended.pop(number) for memory in self.memories))

    @rule(later_ms=st.integers(0, 30), steps=st.integers(1, 12), copies=st.booleans())
    def steps(self, later_ms: int, steps: int, copies: bool) -> None:
        self.now_ms += later_ms
        for _ in range(steps):
            self.step()
            if copies:
                self.carry_out_copies()

    def step(self) -> bool:
        made = self.scheduler.plan(self.now_ms)
        if made is None:
            return False
        plan, work = made
        follower_work = self.follower.apply(decode(encode(plan)))
        assert self.replica.digest == self.follower.digest
        mine, theirs = (
            [one for one in rank.decisions if one.plan == plan.number] for rank in (self.replica, self.follower)
        )
        assert mine == theirs
        for memory in self.memories:
            memory.begin(work.copies)
        for pull in work.pulls:
            self.pulls[pull.request] = pull
        for key in work.unpins:
            if key in self.expected and self.expected[key].pinned:
                del self.expected[key]
        for pin in work.pins:
            self.pins[pin.request] = pin.pages.tolist()
        sampled = Sampled((), ())
        if work.batch is not None:
            assert len(work.batch.token_ids) <= 6
            assert follower_work.batch is not None
            answers, same = (
                m.forward(b) for m, b in zip(self.memories, (work.batch, follower_work.batch), strict=True)
            )
            assert answers == same
            sampled = Sampled(tuple(answers), tuple(answers.values()))
        for output in self.scheduler.complete(plan, sampled):
            self.hear(output)
        return True

    def hear(self, output: Output) -> None:
        expected = self.expected[output.key]
        assert not expected.over, "something came after the end"
        match output:
            case Started():
                assert not expected.started
                expected.started = True
                expected.cached = output.cached_tokens
                assert output.cached_tokens % BLOCK == 0
                limit = len(expected.request.token_ids)
                assert output.cached_tokens <= (limit if expected.request.phase is Phase.GENERATION else limit - 1)
            case TokenOut():
                assert output.token_id == next_token((*expected.request.token_ids.tolist(), *expected.answer))
                expected.answer.append(output.token_id)
            case HandoffReady():
                assert expected.request.phase is Phase.CONTEXT
                assert output.first_token == next_token(tuple(expected.request.token_ids.tolist()))
                expected.pinned = True
                memory = self.memories[0]
                pages = self.pins[output.key]
                prompt = expected.request.token_ids.tolist()
                for at in range(len(prompt)):
                    slot = pages[at // BLOCK] * BLOCK + at % BLOCK
                    assert memory.slots[slot] == tuple(prompt[: at + 1])
            case KvArrived():
                assert expected.request.phase is Phase.GENERATION
            case Finished(reason=FinishReason.CANCELLED) | Failed():
                expected.over = True
            case Finished():
                expected.over = True
                stopped = expected.answer[-1] in expected.request.stopping.stop_token_ids
                assert output.reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if expected.over:
            del self.expected[output.key]

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        self.replica.check()
        self.follower.check()

    def teardown(self) -> None:
        """With its pulls ended and its pins expired, everything that was asked for ends, and no page is held."""
        for _ in range(400):
            for key in list(self.pulls):
                del self.pulls[key]
                self.scheduler.pull_failed(key, "the test is over")
            self.now_ms += 10
            self.carry_out_copies()
            if not self.step() and not self.expected:
                break
            self.replica.check()
        left = {key: expected for key, expected in self.expected.items() if not expected.cancelled}
        assert not left, "a request that never ends"
        assert self.scheduler.load.running == self.scheduler.load.queued == 0
        assert self.replica.cache.num_available == NUM_PAGES
        assert not self.replica.cache.pools.copies.running
        assert not any(known.legs for known in self.replica.conversations), "a conversation with requests that are over"


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
