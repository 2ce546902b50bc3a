"""Recorded sessions as load: a number of them alive at any time, each played with tokens of its own.

A play is one session from a point of its life to its end; where one ends the next begins. Two plays of one session
share no token, so nothing is cached that would not be.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kinroute.replay.traces import Int32s, Kind, Session, Stop, TracedRequest, tokens_of

Blocks: TypeAlias = tuple[tuple[int, int], ...]
"""Runs of block ids: (first, count)."""


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """One request of the load. `play` counts from 0; `conversation` and `parent` are unique over all plays.

    `prompt_blocks`, `answer_blocks`: runs of block ids, (first, count), unique over all plays; the answer's last block
    may be used in part. The tokens to generate are those with which the conversation's next prompt goes on, as far as
    it does, so the answer's blocks can be reused exactly there. `is_last`: nothing of this conversation follows.
    `lane`: which of those alive at the beginning it is, or came after.
    """

    t_s: float
    duration_s: float
    play: int
    conversation: str
    parent: str | None
    kind: Kind
    stop: Stop | None
    prompt_blocks: Blocks
    answer_blocks: Blocks
    output_tokens: int
    block_tokens: int
    is_last: bool
    lane: int = 0

    @property
    def num_prompt_blocks(self) -> int:
        return sum([count for _, count in self.prompt_blocks])

    @property
    def prompt(self) -> Int32s:
        """Its tokens, made anew."""
        return tokens_of(self.prompt_blocks, self.block_tokens)

    @property
    def answer(self) -> Int32s:
        """The tokens to generate, made anew."""
        return tokens_of(self.answer_blocks, self.block_tokens)[: self.output_tokens]


def replay(
    sessions: Sequence[Session], *, alive: int, longest_gap_s: float, draws: random.Random
) -> Iterator[PlayedRequest]:
    """Requests by arrival, without end. At first `alive` sessions are each somewhere in their life, as `draws` say.

    Sessions are taken in an order drawn anew each time all of them were; idle gaps are cut to `longest_gap_s`.
    """
    order = _endless([session.with_gaps_cut(longest_gap_s) for session in sessions if session.requests], draws)
    ids = 0
    # (time of the next request, number of the play, where it is); plays differ in number, so nothing else is compared.
    next_up: list[tuple[float, int, _Play]] = []

    def begin(now_s: float, number: int, lane: int, lived: float) -> None:
        nonlocal ids
        session = next(order)
        point_s = lived * session.length_s
        play = _Play(session, number, lane, ids, now_s - point_s)
        ids += play.ids_needed
        play.skip(point_s)
        heapq.heappush(next_up, (play.next_s, number, play))

    numbers = itertools.count()
    for lane in range(alive):
        begin(0.0, next(numbers), lane, draws.random())
    while True:
        now_s, number, play = next_up[0]
        if play.is_over:
            heapq.heappop(next_up)
            begin(now_s, next(numbers), play.lane, 0.0)
        else:
            yield play.take()
            heapq.heapreplace(next_up, (play.next_s, number, play))


def as_recorded(sessions: Sequence[Session]) -> list[PlayedRequest]:
    """Every request once, when it was recorded; where one session has ended the next begins."""
    played: list[PlayedRequest] = []
    began_s, ids = 0.0, 0
    for number, session in enumerate(sessions):
        play = _Play(session, number, 0, ids, began_s)
        ids += play.ids_needed
        while not play.is_over:
            played.append(play.take())
        began_s += session.length_s
    return played


def _endless(sessions: list[Session], draws: random.Random) -> Iterator[Session]:
    if not sessions:
        raise ValueError("no session has a request")
    while True:
        yield from draws.sample(sessions, len(sessions))


class _Play:
    """A session that began at `began_s` of the load and whose block ids begin at `first_id`."""

    def __init__(self, session: Session, number: int, lane: int, first_id: int, began_s: float) -> None:
        self._session = session
        self._number = number
        self.lane = lane
        self._first_id = first_id
        self._began_s = began_s
        self._at = 0
        self._own_ids = first_id + session.block_bound
        """For what is generated and never seen again."""
        self._following = _following(session.requests)
        answers = sum(-(-request.output_tokens // session.block_tokens) for request in session.requests)
        self.ids_needed = session.block_bound + answers

    def skip(self, until_s: float) -> None:
        """What arrived before this point of the session is not played."""
        requests = self._session.requests
        while self._at < len(requests) and requests[self._at].t_s < until_s:
            self._at += 1

    @property
    def is_over(self) -> bool:
        return self._at == len(self._session.requests)

    @property
    def next_s(self) -> float:
        """When its next request arrives, or when its last answer has ended."""
        session = self._session
        return self._began_s + (session.length_s if self.is_over else session.requests[self._at].t_s)

    def take(self) -> PlayedRequest:
        request = self._session.requests[self._at]
        following = self._following[self._at]
        self._at += 1
        return PlayedRequest(
            t_s=self._began_s + request.t_s,
            duration_s=request.duration_s,
            play=self._number,
            conversation=f"{self._number}/{request.conversation}",
            parent=f"{self._number}/{request.parent}" if request.parent is not None else None,
            kind=request.kind,
            stop=request.stop,
            prompt_blocks=tuple((first + self._first_id, count) for first, count in request.blocks),
            answer_blocks=self._answer(request, following),
            output_tokens=request.output_tokens,
            block_tokens=self._session.block_tokens,
            is_last=following is None,
            lane=self.lane,
        )

    def _answer(self, request: TracedRequest, following: TracedRequest | None) -> Blocks:
        wanted = -(-request.output_tokens // self._session.block_tokens)
        blocks: list[tuple[int, int]] = []
        if following is not None and request.is_extended_by(following):
            again = _part(following.blocks, request.num_blocks, request.num_blocks + wanted)
            blocks = [(first + self._first_id, count) for first, count in again]
        fresh = wanted - sum(count for _, count in blocks)
        if fresh:
            blocks.append((self._own_ids, fresh))
        self._own_ids += wanted
        return tuple(blocks)


def _following(requests: Sequence[TracedRequest]) -> list[TracedRequest | None]:
    """For each request the next of its conversation."""
    after: dict[str, TracedRequest] = {}
    following: list[TracedRequest | None] = []
    for request in reversed(requests):
        following.append(after.get(request.conversation))
        after[request.conversation] = request
    return following[::-1]


def _part(blocks: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Blocks [start, stop) of a prompt, as far as it goes."""
    part: list[tuple[int, int]] = []
    at = 0
    for first, count in blocks:
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            part.append((first + low - at, high - low))
        at += count
    return part
