"""A replica and its naive model side by side: whatever is done to one is done to both, and then all is compared.

It plays the scheduler, but a wilder one: what is done next, and to whom, is thrown with dice.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tests.worker.core.cache_pictures import Listener, check_alike
from tests.worker.core.naive_cache import Block
from tests.worker.core.naive_replica import NaiveReplica, NaiveRequest, Worth
from worker.core import plan as plans
from worker.core.config import CacheConfig, ReusePolicy
from worker.core.conversations import News, StopReason
from worker.core.replica import Replica
from worker.core.retention import CommittedRetentionHandle
from worker.core.tiers import Tier
from worker.core.types import RequestKey

BLOCK = 2
NUM_PAGES = 12
MAX_TOKENS = 22
MAX_REQUESTS = 5
FOREVER = 1 << 30
SCOPES = (b"", b"", b"", b"other")
LINEAGES = (
    ("", None), ("a", None), ("a", None), ("b", "a"), ("c", "a"), ("d", "b"), ("e", "z"), ("a", "d"), ("c", "b"),
)  # fmt: skip
WORTHS: tuple[Worth, ...] = (
    (), (), (), ((0, 80, 0),), ((0, 1, 0),), ((0, 29, 0), (2, 30, 0)), ((0, 35, 0), (1, 60, 20), (3, 20, 40)),
    ((0, 90, 15),), ((0, 30, 5), (4, 31, 0)), ((2, 0, 0),),
)  # fmt: skip


class Dice(Protocol):
    def __call__(self, sides: int, /) -> int:
        """A number in [0, sides)."""


def make_config(dice: Dice) -> CacheConfig:
    return CacheConfig(
        num_pages=NUM_PAGES,
        tokens_per_block=BLOCK,
        policy=ReusePolicy.PER_CONVERSATION,
        num_host_pages=(0, 1, 4, 8, 20)[dice(5)],
        num_disk_pages=(0, 0, 3, 10)[dice(4)],
        finished_subagent_priority=(0, 1, 30)[dice(3)],
        finished_subagent_min_idle_iterations=(0, 2, 4)[dice(3)],
        max_offload_pages_per_plan=(1, 3, 64)[dice(3)],
        max_onboard_pages_per_plan=64,
        tells_events=True,
    )


class CachePair:
    """Each method named in `RULES` does one thing if it can be done now, and returns whether it did."""

    def __init__(self, dice: Dice) -> None:
        self.config = make_config(dice)
        self.real = Replica(self.config)
        self.naive = NaiveReplica(self.config)
        self.now_ms = 0
        self.keys = 0
        self.sampled: list[int] = []
        self.suspended: list[tuple[NaiveRequest, bool]] = []
        self.pulling: set[int] = set()
        self.handles: list[tuple[str, CommittedRetentionHandle, set[Block]]] = []
        self.listener = Listener()
        self.histories: list[list[int]] = [[1, 2] * 8, [1, 2, 2, 1] * 4, [2, 1, 1] * 5]
        self._begin()

    # Plans.

    def next_plan(self, dice: Dice) -> bool:
        """This plan is closed, time passes, and what it computed is committed in the next."""
        self.listener.hear(self.real.finish().events)
        self.naive.finish()
        self.compare()
        self.listener.check(self.real)
        self.now_ms += (0, 1, 10, 20)[dice(4)]
        self._begin()
        for key in self.sampled:
            token = 1 + dice(2)
            self._act(plans.Sampled((key,), (token,)))
            self.naive.requests[key].tokens.append(token)
        self.sampled = []
        return True

    def _begin(self) -> None:
        number = self.naive.number + 1
        self.real.begin(number, self.now_ms)
        self.naive.begin(number, self.now_ms)

    def _act(self, act: plans.AnyAct) -> bool:
        return self.real.act(act)

    # Requests.

    def admit(self, dice: Dice) -> bool:
        """A new request: a beginning that others share, and a few tokens of its own."""
        if len(self.naive.requests) >= MAX_REQUESTS:
            return False
        histories = [*self.histories, *(one.tokens for one in self.naive.requests.values())]
        history = histories[dice(len(histories))]
        tokens = history[: len(history) if dice(2) else 1 + dice(len(history))] + [1 + dice(2) for _ in range(dice(6))]
        tokens = tokens[:MAX_TOKENS]
        name, parent = LINEAGES[dice(len(LINEAGES))]
        self.keys += 1
        request = NaiveRequest(
            self.keys, SCOPES[dice(len(SCOPES))], tokens, 0, name, FOREVER if dice(4) else len(tokens),
            WORTHS[dice(len(WORTHS))], prefills=dice(6) > 0,
        )  # fmt: skip
        self._admit(dice, request, parent, resumed=False)
        return True

    def resume(self, dice: Dice) -> bool:
        if not self.suspended or len(self.naive.requests) >= MAX_REQUESTS:
            return False
        request, pulls = self.suspended.pop(dice(len(self.suspended)))
        request.returns = False
        request.prefills = request.prefills and not pulls
        self._admit(dice, request, None, resumed=True)
        return True

    def _admit(self, dice: Dice, request: NaiveRequest, parent: str | None, *, resumed: bool) -> None:
        pulls = not request.prefills and not resumed
        usable = len(request.tokens) - (0 if pulls else 1)
        tokens = np.array(request.tokens, np.int32)
        match = self.real.cache.match(request.scope, tokens, usable // BLOCK)
        end = self.naive.cache.match(request.scope, self.naive.split(request.tokens[:usable]))
        assert match.blocks == len(list(end.up())), "matched another length"
        part = None
        if all(block.is_readable for block in end.up()) and not pulls:
            rest = request.tokens[match.blocks * BLOCK : usable]
            part = self.naive.cache.match_within(end, tuple(rest))
            found = self.real.cache.match_within(match, np.array(rest, np.int32))
            assert (found is None) == (part is None), "one found a block to copy from, the other none"
            assert found is None or part is None or found.tokens == part[1], "another part of a block"
            copy = None if found is None else (found.run.number, found.index, found.tokens)
            part, copy = (part, copy) if part is not None and self._has_page_besides(end, part[0]) else (None, None)
        else:
            copy = None
        turn, prompt = ("", "1", "2")[dice(3)], (b"", b"p", b"q")[dice(3)]
        self._act(
            plans.Admit(
                key=request.key,
                scope=request.scope,
                run=match.run.number if match.run is not None else 0,
                length=match.length,
                matched=match.blocks * BLOCK,
                token_ids=plans.pack(tokens[match.blocks * BLOCK :]),
                commit_until=request.commit_until,
                copy=copy,
                conversation=request.conversation,
                parent=parent,
                prefills=request.prefills,
                resumed=resumed,
                worth=request.worth,
                turn=turn,
                prompt_hash=prompt,
            )
        )
        self.naive.admit(request, end, part)
        if request.conversation and not resumed:
            self.naive.register(request.key, parent, turn, prompt, is_context=request.prefills)
        if pulls:
            self.pulling.add(request.key)
        if part is not None:
            self._compute(request.key, 1)

    def _has_page_besides(self, *ends: Block) -> bool:
        """One of the device is left once these are held too."""
        cache = self.naive.cache
        kept = cache.held().union(*(end.up() for end in ends))
        return cache.num_free(Tier.DEVICE) > 0 or any(
            one.tier is Tier.DEVICE and one not in kept for one in cache.blocks()
        )

    def chunk(self, dice: Dice) -> bool:
        """Some tokens of a request are computed in this plan; its first ones are a return of its conversation."""
        able = [
            key
            for key, one in self.naive.requests.items()
            if not one.loading
            and not one.pinned
            and key not in self.pulling
            and key not in self.naive.computing
            and one.computed < min(len(one.tokens), MAX_TOKENS)
        ]
        if not able:
            return False
        key = able[dice(len(able))]
        request = self.naive.requests[key]
        left = min(len(request.tokens), MAX_TOKENS) - request.computed
        self._compute(key, 1 + dice(left) if dice(2) else min(left, BLOCK))
        return True

    def _compute(self, key: int, count: int) -> None:
        request = self.naive.requests[key]
        if request.returns:
            self._act(plans.Return(key))
            request.returns = False
            self.naive.demote_children(request.conversation)
        sample = request.computed + count == len(request.tokens)
        done = self._act(plans.Chunk(key, count, sample))
        assert done == self.naive.chunk(key, count, sample=sample), "one found pages, the other did not"
        if done and sample:
            if key % 4 == 0:
                self._act(plans.Pin(key))
                request.pinned = True
            else:
                self.sampled.append(key)

    def gather(self, dice: Dice) -> bool:
        """A pull takes some of its pages, or all that it waited for have arrived."""
        able = [key for key in sorted(self.pulling) if not self.naive.requests[key].loading]
        if not able:
            return False
        key = able[dice(len(able))]
        needed = self.naive.pages_needed(key, len(self.naive.requests[key].tokens))
        if needed:
            count = 1 + dice(needed)
            assert self._act(plans.Gather(key, count)) == self.naive.take(key, count)
            return True
        self._act(plans.Arrived(key))
        self.naive.arrive(key)
        self.pulling.remove(key)
        self.naive.requests[key].prefills = False
        return True

    def release(self, dice: Dice) -> bool:
        key = self._pick_idle(dice)
        if key is None:
            return False
        self.histories = [*self.histories[:3], *self.histories[3:][-8:], self.naive.requests[key].tokens]
        self._act(plans.Release(key))
        self.naive.release(key)
        self.pulling.discard(key)
        return True

    def suspend(self, dice: Dice) -> bool:
        key = self._pick_idle(dice)
        if key is None or self.naive.requests[key].pinned:
            return False
        self._act(plans.Suspend(key))
        self.suspended.append((self.naive.let_go(key), key in self.pulling))
        self.pulling.discard(key)
        return True

    def abandon(self, dice: Dice) -> bool:
        """A suspended request is cancelled."""
        if not self.suspended:
            return False
        request, _ = self.suspended.pop(dice(len(self.suspended)))
        self._act(plans.Abandon(request.conversation))
        self.naive.abandon(request.conversation)
        return True

    def _pick_idle(self, dice: Dice) -> int | None:
        able = [key for key in self.naive.requests if key not in self.naive.computing]
        return able[dice(len(able))] if able else None

    # Tiers.

    def load(self, dice: Dice) -> bool:
        """More of what a request found in colder tiers begins to come back, or all of it is there."""
        able = [key for key, one in self.naive.requests.items() if one.loading]
        if not able:
            return False
        key = able[dice(len(able))]
        if self.naive.is_ready(key):
            self._act(plans.Loaded(key))
            self.naive.requests[key].loading = False
            return True
        num_cold = self.naive.num_cold(key)
        if not num_cold:
            return False
        count = 1 + dice(num_cold)
        assert self._act(plans.Load(key, count)) == self.naive.cache.load(key, count), "one found pages"
        return True

    def copy_ends(self, dice: Dice) -> bool:
        copies = self.naive.cache.copies
        if not copies:
            return False
        number = sorted(copies)[dice(len(copies))]
        size = len(copies[number].blocks)
        good = size if dice(6) else dice(size + 1)
        self._act(plans.Copied(number, good))
        self.naive.cache.copied(number, good)
        self._shorten()
        return True

    def tier_fails(self, dice: Dice) -> bool:
        tier = (Tier.HOST, Tier.DISK)[dice(2)]
        if tier in self.naive.cache.off or dice(40):
            return False
        self._act(plans.Off(tier))
        self.naive.cache.switch_off(tier)
        self._shorten()
        return True

    def _shorten(self) -> None:
        for key in self.naive.shorten():
            request, sequence = self.naive.requests[key], self.real.sequences[RequestKey(key)]
            lost = request.tokens[request.computed : sequence.base]
            self._act(plans.Refill(key, plans.pack(np.array(lost, np.int32))))

    # Retention.

    def hear_of(self, dice: Dice) -> bool:
        name, news = "abcde"[dice(5)], (News.GENERATING, News.ENDED, News.ENDED, News.CLOSED)[dice(4)]
        self._act(plans.Heard(name, news, StopReason.TOOL_CALL, final=False))
        self.naive.heard(name, news)
        return True

    def return_elsewhere(self, dice: Dice) -> bool:
        name, turn = "abz"[dice(3)], ("", "1", "3")[dice(3)]
        self._act(plans.Returned(name, turn))
        self.naive.returned(name, turn)
        return True

    def plan_retention(self, dice: Dice) -> bool:
        """A snapshot of what a conversation owns now, for later."""
        name = "abcde"[dice(5)]
        handle = self.real.cache.plan_committed_retention(name)
        self.handles = [*self.handles[-3:], (name, handle, self.naive.cache.owned([name]))]
        return True

    def apply_retention(self, dice: Dice) -> bool:
        if not self.handles:
            return False
        name, handle, covered = self.handles.pop(dice(len(self.handles)))
        priority = (0, 20, 40)[dice(3)]
        handle.apply(priority)
        self.naive.cache.demote(name, covered, priority)
        return True

    def demote(self, dice: Dice) -> bool:
        """A conversation that owns something is demoted, whatever it does."""
        owners = sorted({block.owner for block in self.naive.cache.blocks()} - {""})
        if not owners:
            return False
        name = owners[dice(len(owners))]
        self.real.cache.plan_committed_retention(name).apply(1)
        self.naive.cache.demote(name, self.naive.cache.owned([name]), 1)
        return True

    def clear(self, dice: Dice) -> bool:
        if dice(12):
            return False
        scope, owners = ((None, None), (b"other", None), (None, ("a", "b")), (None, ("c",)))[dice(4)]
        self._act(plans.Clear(scope, owners))
        self.naive.cache.clear(scope, owners)
        return True

    # Comparing.

    def look_up(self, dice: Dice) -> bool:
        """Any prompt matches as far, and those that would leave next are the same."""
        tokens = [1 + dice(2) for _ in range(dice(MAX_TOKENS))]
        match = self.real.cache.match(b"", np.array(tokens, np.int32), len(tokens) // BLOCK)
        assert match.blocks == len(list(self.naive.cache.match(b"", self.naive.split(tokens)).up()))
        for tier in Tier:
            run, block = self.real.cache.tree.orders[tier].first(), self.naive.cache.victim(tier)
            assert (run is None) == (block is None), f"somebody leaves {tier.name}, or nobody"
            if run is not None and block is not None:
                assert len(block.path[1]) == (run.start + run.ends[tier]) * BLOCK, f"another leaves {tier.name} first"
                assert (run.effective(tier), run.stamp) == (block.effective, block.stamp), f"by another order {tier}"
        return True

    def compare(self) -> None:
        """Every invariant of the real one, and all that is told of either is told of both."""
        self.real.check()
        check_alike(self.real, self.naive)

    def settle(self, dice: Dice) -> None:
        """Every copy ends, every request is over, and nothing is held."""
        self.next_plan(dice)
        for number in sorted(self.naive.cache.copies):
            good = len(self.naive.cache.copies[number].blocks)
            self._act(plans.Copied(number, good))
            self.naive.cache.copied(number, good)
        while self.release(dice):
            self.compare()
        self.compare()
        assert self.real.cache.num_available == self.config.num_pages, "pages that nobody gave back"


RULES: dict[str, int] = {
    "next_plan": 8, "admit": 6, "chunk": 14, "release": 4, "suspend": 1, "resume": 1, "abandon": 1, "gather": 2,
    "load": 4, "copy_ends": 4, "tier_fails": 1, "hear_of": 1, "return_elsewhere": 1, "plan_retention": 1,
    "apply_retention": 1, "demote": 1, "clear": 1, "look_up": 1,
}  # fmt: skip
"""Each rule, and how often it is tried."""
