"""When requests begin and end, as far as that does not depend on what is cached.

A worker admits a request in a step after its arrival: when the step that runs is over, and when nobody who came before
it is just computing a block of its prompt. Who waits for whom depends on the policy, so a bound of all policies takes
of every hold only what is certain: from the last plan in which it may begin to the first in which it may be over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kinroute.replay.arm import STEP_MS
from kinroute.replay.segments import Bools, Float64s, Int64s, Segments


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Plans, [N]: in `starts` requests hold their prompts, in `ends` they let go, in `answers` their answers are kept.

    `is_free`: [S], blocks that take no place. `given`: [N], their hits.
    """

    starts: Int64s
    ends: Int64s
    answers: Int64s
    is_free: Bools
    given: Int64s


def plans_at(times_s: Float64s) -> Int64s:
    """The first plan at each of these times or after it; a microsecond counts for nothing."""
    return np.ceil(times_s * (1000 / STEP_MS) - 1e-4).astype(np.int64)


def as_they_come(segments: Segments) -> Schedule:
    """Each begins in the plan in which it comes, and its answer is kept in that in which it is over."""
    starts = plans_at(segments.arrivals_s)
    ends = np.maximum(plans_at(segments.ends_s), starts + 1)
    nothing_free = np.zeros(len(segments.length), np.bool_)
    return Schedule(starts, ends, ends, nothing_free, np.zeros(len(starts), np.int64))


def certain(segments: Segments) -> Schedule:
    """What is true of every policy under which nobody waits for room.

    A start is put off by the step that runs, by a step for each time that somebody computes a block of the prompt, and
    to the end of any answer that goes on with it and may be kept just then. An answer is kept when its last token but
    one is told, which may be a plan before its end or a plan after it; the latter counts. Of a request that may be over
    before it may begin nothing is certain: its blocks take no place, and are hits wherever anybody may have had them.
    """
    return _Certain(segments).schedule()


class _Certain:
    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._come = as_they_come(segments)
        self._starts = self._come.starts + 1
        self._answers = self._come.ends + 1
        self._is_loose = np.zeros(segments.num_requests, np.bool_)
        self._open: list[int] = []
        """Who may still begin."""
        self._kept: dict[int, list[tuple[int, int]]] = {}
        """When an answer, by its first segment, may be kept: plans from, to."""

    def schedule(self) -> Schedule:
        for request in range(self._segments.num_requests):
            self._open = [one for one in self._open if self._starts[one] >= self._come.starts[request]]
            self._put_off(request)
            self._open.append(request)
        self._is_loose |= self._come.ends <= self._starts
        is_free = np.zeros(len(self._segments.length), np.bool_)
        for request in np.flatnonzero(self._is_loose).tolist():
            is_free[self._segments.path(request)] = True
        return Schedule(self._starts, self._come.ends, self._answers, is_free, self._given(is_free))

    def _put_off(self, request: int) -> None:
        prompt = self._segments.prompt(request).tolist()
        comes, ends = int(self._come.starts[request]), int(self._come.ends[request])
        start = comes + 1 + self._waits(prompt, comes)
        windows = [window for segment in prompt for window in self._kept.get(segment, ())]
        while any(first <= start < last for first, last in windows):
            start = min(last for first, last in windows if first <= start < last)
        self._starts[request] = start
        answer = self._segments.path(request)[len(prompt) :].tolist()
        if answer:
            self._answers[request] = kept_by = max(ends + 1, start + 2)
            kept = [one for one in self._kept.get(answer[0], ()) if one[1] > comes]
            first = max(ends - 1, comes + 1)
            self._kept[answer[0]] = [*kept, (first, kept_by)]
            self._loosen(answer[0], first)

    def _waits(self, prompt: list[int], comes: int) -> int:
        """How often it may wait, at most: whoever is admitted holds what both need, so that only one with more of it
        can make it wait again; but for those who may be over by then."""
        until = comes + 1 + len(self._open)
        depths: set[int] = set()
        short = 0
        for one in self._open:
            depth = _common(prompt, self._segments.prompt(one).tolist())
            if depth and self._come.ends[one] <= until:
                short += 1
            elif depth:
                depths.add(depth)
        return short + len(depths)

    def _loosen(self, answer: int, first: int) -> None:
        """Who came earlier may still begin when this answer is kept, and need it."""
        needs = [
            one for one in self._open if self._starts[one] >= first and answer in self._segments.prompt(one).tolist()
        ]
        roots = {int(self._segments.prompt(one)[0]) for one in needs}
        for one in self._open:
            if roots and int(self._segments.prompt(one)[0]) in roots:
                self._is_loose[one] = True

    def _given(self, is_free: Bools) -> Int64s:
        given = np.zeros(self._segments.num_requests, np.int64)
        if not is_free.any():
            return given
        come_by = np.searchsorted(self._come.starts, self._starts, side="right")
        first, second = _first_two(self._segments)
        for request, hi in enumerate(come_by.tolist()):
            prompt = self._segments.prompt(request)
            free = prompt[is_free[prompt]]
            others = np.where(first[free] == request, second[free], first[free])
            given[request] = self._segments.length[free[others < hi]].sum()
            # The last block of a prompt is computed in any case.
            given[request] -= bool(len(free) and free[-1] == prompt[-1] and others[-1] < hi)
        return given


def _common(one: list[int], other: list[int]) -> int:
    """With how many segments both begin."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other))


def _first_two(segments: Segments) -> tuple[Int64s, Int64s]:
    """The first and the second request with each segment, counted once a request; N where there is none."""
    none = segments.num_requests
    first = np.full(len(segments.length), none, np.int64)
    second = first.copy()
    for request in range(none - 1, -1, -1):
        path = segments.path(request)
        second[path] = first[path]
        first[path] = request
    return first, second
