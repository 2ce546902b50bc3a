"""Whom a request waits for in the closed loop, as was recorded: think and tool times stay, answers may be faster.

A turn comes so long after its conversation's last answer and those of its sub-agents that had ended by then; the first
request of a sub-agent so long after the turn that launched it; a session after the one before it in its lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kinroute.replay.plays import PlayedRequest

SAME_S = 1e-6
"""Times that differ by less are one: they are sums of floats."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A request comes `after_s` after the last of these: the ends of the answers `ends`, and the arrival `arrival`, all
    of them places in the load before its own; where there is none, after the beginning."""

    after_s: float
    ends: tuple[int, ...] = ()
    arrival: int | None = None


@dataclass(slots=True)
class _Talk:
    """`last`: the place of a conversation's last request; `children`: names of its sub-agents."""

    last: int
    children: list[str] = field(default_factory=list)


def waits_of(requests: Sequence[PlayedRequest]) -> list[Wait]:
    """One for each of them; they come by arrival."""
    return _Waits(requests).all()


class _Waits:
    def __init__(self, requests: Sequence[PlayedRequest]) -> None:
        self._requests = requests
        self._talks: dict[str, _Talk] = {}
        self._first: dict[int, int] = {}
        """By play, the place of its first request."""
        self._names: dict[int, list[str]] = {}
        """By play, its conversations."""
        self._play_of: dict[int, int] = {}
        """By lane, its latest play."""

    def all(self) -> list[Wait]:
        waits: list[Wait] = []
        for index, request in enumerate(self._requests):
            waits.append(self._wait(request))
            self._note(index, request)
        return waits

    def _note(self, index: int, request: PlayedRequest) -> None:
        self._first.setdefault(request.play, index)
        self._play_of[request.lane] = request.play
        talk = self._talks.get(request.conversation)
        if talk is not None:
            talk.last = index
            return
        self._talks[request.conversation] = _Talk(index)
        self._names.setdefault(request.play, []).append(request.conversation)
        parent = self._talks.get(request.parent or "")
        if parent is not None:
            parent.children.append(request.conversation)

    def _wait(self, request: PlayedRequest) -> Wait:
        talk = self._talks.get(request.conversation)
        if talk is not None:
            began_s = self._requests[talk.last].t_s
            children = [self._talks[name].last for name in talk.children]
            return self._behind(request, talk.last, [one for one in children if self._requests[one].t_s >= began_s])
        parent = self._talks.get(request.parent or "")
        if parent is not None:
            return self._behind(request, parent.last, [])
        first = self._first.get(request.play)
        if first is not None:
            return Wait(request.t_s - self._requests[first].t_s, arrival=first)
        before = self._play_of.get(request.lane)
        if before is None:
            return Wait(request.t_s)
        return self._after(request, [self._talks[name].last for name in self._names[before]])

    def _behind(self, request: PlayedRequest, last: int, children: list[int]) -> Wait:
        """After the answer `last`, if that was over, and those of `children` that were."""
        if not self._was_over(last, request.t_s):
            return Wait(request.t_s - self._requests[last].t_s, arrival=last)
        return self._after(request, [last, *(one for one in children if self._was_over(one, request.t_s))])

    def _after(self, request: PlayedRequest, ends: list[int]) -> Wait:
        ended_s = max(self._end_s(one) for one in ends)
        return Wait(max(0.0, request.t_s - ended_s), ends=tuple(dict.fromkeys(ends)))

    def _was_over(self, index: int, at_s: float) -> bool:
        return self._end_s(index) <= at_s + SAME_S

    def _end_s(self, index: int) -> float:
        return self._requests[index].t_s + self._requests[index].duration_s
