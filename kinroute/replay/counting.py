"""Counts what a simulated worker does, after the warm-up."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kinroute.replay.arm import Arm
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.regrets import regretted
from kinroute.replay.residency import family_at, family_to_watch
from kinroute.replay.results import Family, RunResult, Sample, Service, SessionTail, Tail, TierSample
from worker.core.plan import Admit, Plan, Suspend
from worker.core.replica import Replica
from worker.core.stats import CacheStats
from worker.core.tiers import Tier
from worker.core.types import DEFAULT_PRIORITY

SAMPLES = 200
"""Of the timeline."""
WORST_SESSIONS = 20
FAMILY_AFTER = 0.8
"""The family is looked at when this share of the requests has arrived."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Totals at a moment."""

    stats: CacheStats
    plan: int


class Counts:
    """Told of arrivals and plans, in their order."""

    def __init__(self, requests: Sequence[PlayedRequest], arm: Arm, replica: Replica) -> None:
        self._requests = requests
        self._arm = arm
        self._replica = replica
        self._warm = int(arm.warmup * len(requests))
        self._matched = np.zeros(len(requests), np.int64)
        self._uncached = np.zeros(len(requests), np.int64)
        self._refused = 0
        self._suspensions = 0
        self._mark = _mark(replica)
        self._sampled = self._mark
        self._timeline: list[Sample] = []
        self._family: Family | None = None
        self._family_at = int(FAMILY_AFTER * len(requests))
        self._to_watch = family_to_watch(requests, self._family_at)
        self._arrived = 0

    def arrived(self, now_ms: float) -> None:
        """One more request did."""
        if self._arrived == self._warm:
            self._mark = _mark(self._replica)
        if self._arrived % max(1, len(self._requests) // SAMPLES) == 0:
            self._sample(now_ms)
        if self._arrived == self._family_at:
            self._family = family_at(self._requests[: self._family_at], self._to_watch, self._replica, now_ms / 1000)
        self._arrived += 1

    def refused(self, index: int) -> None:
        request = self._requests[index]
        self._uncached[index] = request.num_prompt_blocks * request.block_tokens
        self._refused += index >= self._warm

    def planned(self, plan: Plan) -> None:
        """Keys of requests are their places, counted from 1."""
        for act in plan.acts:
            if isinstance(act, Admit):
                if not act.resumed:
                    self._admitted(act)
            elif isinstance(act, Suspend):
                self._suspensions += act.key > self._warm

    def _admitted(self, act: Admit) -> None:
        index = act.key - 1
        request = self._requests[index]
        self._matched[index] = act.matched // request.block_tokens
        self._uncached[index] = len(act.token_ids) // 4

    def _sample(self, now_ms: float) -> None:
        cache = self._replica.cache
        demoted = [0] * len(Tier)
        for run in cache.tree.runs():
            if run.stretches.has_demoted:
                for start, stop, terms in run.stretches.of_length(run.length):
                    if terms.priority < DEFAULT_PRIORITY:
                        for tier in Tier:
                            first, last = run.span(tier)
                            demoted[tier] += max(0, min(stop, last) - max(start, first, run.held_length))
        tiers: dict[str, TierSample] = {}
        for tier in Tier:
            counts = cache.pools.counts(tier)
            if counts.total:
                tiers[tier.name.lower()] = TierSample(
                    counts.total, counts.free, counts.held, counts.cached, counts.moving, demoted[tier]
                )
        before, self._sampled = self._sampled.stats, _mark(self._replica)
        stats = self._sampled.stats
        demotions = stats.demoted_blocks - before.demoted_blocks
        self._timeline.append(Sample(now_ms / 1000, tiers, demotions, _dropped(stats) - _dropped(before)))

    def result(self, now_ms: float, service: Service | None) -> RunResult:
        """All requests have ended."""
        arm, before, stats = self._arm, self._mark.stats, self._replica.cache.stats
        counted = self._requests[self._warm :]
        prompt_blocks = sum(request.num_prompt_blocks for request in counted)
        hit_blocks = int(self._matched[self._warm :].sum())
        offloaded: dict[str, int] = {}
        onboarded: dict[str, int] = {}
        for (source, target), moved in stats.moved_pages.items():
            pages = moved - before.moved_pages.get((source, target), 0)
            into, tier = (offloaded, target) if target > source else (onboarded, source)
            into[tier.name.lower()] = into.get(tier.name.lower(), 0) + pages
        return RunResult(
            policy=arm.policy,
            role=arm.role,
            capacity_blocks=arm.capacity_blocks,
            host_blocks=arm.host_blocks,
            disk_blocks=arm.disk_blocks,
            hints=str(arm.hints),
            tp=arm.tp,
            requests=len(self._requests),
            counted=len(counted),
            refused=self._refused,
            prompt_blocks=prompt_blocks,
            hit_blocks=hit_blocks,
            block_hit_ratio=hit_blocks / max(1, prompt_blocks),
            prompt_tokens=sum(request.num_prompt_blocks * request.block_tokens for request in counted),
            uncached_tokens=int(self._uncached[self._warm :].sum()),
            demotions=stats.demoted_conversations - before.demoted_conversations,
            demoted_blocks=stats.demoted_blocks - before.demoted_blocks,
            restorations=stats.restored_conversations - before.restored_conversations,
            restored_blocks=stats.restored_blocks - before.restored_blocks,
            regretted_blocks=self._regretted(),
            dropped_blocks=_dropped(stats) - _dropped(before),
            offloaded_blocks=offloaded,
            onboarded_blocks=onboarded,
            suspensions=self._suspensions,
            plans=self._replica.number - self._mark.plan,
            simulated_s=now_ms / 1000,
            digest=self._replica.digest.hex(),
            tails=self._tails(),
            sessions=self._sessions(),
            timeline=tuple(self._timeline),
            family=self._family,
            service=service,
        )

    def _regretted(self) -> int | None:
        arm = self._arm
        if arm.closed_loop:
            return None
        if arm.policy == "lru":
            return 0
        blocks = arm.capacity_blocks + arm.host_blocks + arm.disk_blocks
        return int(regretted(self._requests, self._matched, blocks, role=arm.role)[self._warm :].sum())

    def _tails(self) -> dict[str, Tail]:
        uncached = self._uncached[self._warm :]
        kinds = np.array([request.kind for request in self._requests[self._warm :]], dtype="U4")
        parts = {"all": uncached, **{kind: uncached[kinds == kind] for kind in ("root", "sub", "side")}}
        plays = np.array([request.play for request in self._requests[self._warm :]], np.int64)
        parts["session"] = np.bincount(plays, uncached).astype(np.int64)[np.unique(plays)]
        return {name: _tail(part) for name, part in parts.items() if len(part)}

    def _sessions(self) -> tuple[SessionTail, ...]:
        plays: dict[int, list[int]] = {}
        for index in range(self._warm, len(self._requests)):
            plays.setdefault(self._requests[index].play, []).append(index)
        tails: list[SessionTail] = []
        for play, indices in plays.items():
            uncached = self._uncached[indices]
            asked = sum(
                self._requests[index].num_prompt_blocks * self._requests[index].block_tokens for index in indices
            )
            tail, total = _tail(uncached), int(uncached.sum())
            share = total / max(1, asked)
            tails.append(SessionTail(play, len(indices), total, tail.p50, tail.p99, tail.worst, share))
        return tuple(sorted(tails, key=lambda one: (-one.uncached_tokens, one.play))[:WORST_SESSIONS])


def _mark(replica: Replica) -> _Mark:
    return _Mark(copy.deepcopy(replica.cache.stats), replica.number)


def _dropped(stats: CacheStats) -> int:
    return sum(stats.evicted_pages.values())


def _tail(uncached: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tail:
    p50, p99 = np.percentile(uncached, (50, 99), method="inverted_cdf")
    return Tail(len(uncached), float(uncached.mean()), int(p50), int(p99), int(uncached.max()))
