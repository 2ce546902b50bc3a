"""The life of a simulated worker under a load: arrivals, steps, answers, and what the edge tells.

Between events nothing is planned. How long steps take and when tokens come is for those who derive from it.
"""

from __future__ import annotations

import abc
import enum
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kinroute.replay.arm import HANDOFF_MS, Arm
from kinroute.replay.counting import Counts
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.results import RunResult, Service
from kinroute.replay.simulated import GREEDY, PHASES, REASONS, Planned, SimulatedWorker
from worker.core.conversations import News
from worker.core.outputs import Finished, HandoffReady, Output, TokenOut
from worker.core.plan import Suspend
from worker.core.types import Request, RequestKey, Stopping

PROGRESS = 100
"""Requests between two calls of `on_progress`."""


class Event(enum.IntEnum):
    """What happens to a request. At the same moment in this order."""

    ENDS = 0
    IS_RELEASED = 1
    SPEAKS = 2
    ARRIVES = 3


@dataclass(slots=True, eq=False)
class Speaker:
    """A request between its arrival and its end. `answer`: its tokens, of which the worker knows `given`.

    `may_speak`: it sampled, and the token is not told yet.
    """

    index: int
    request: PlayedRequest
    answer: list[int]
    given: int = 0
    may_speak: bool = False

    @property
    def left(self) -> int:
        return len(self.answer) - self.given

    def take(self, count: int) -> list[int]:
        self.given += count
        self.may_speak = False
        return self.answer[self.given - count : self.given]


class Loop(abc.ABC):
    """One run; `run` once. Times are in milliseconds. Keys of requests are their places, counted from 1."""

    def __init__(self, requests: Sequence[PlayedRequest], arm: Arm, on_progress: Callable[[int], None]) -> None:
        self.requests = requests
        self.arm = arm
        self.is_context = arm.role == "context"
        self.worker = SimulatedWorker(arm, _block_tokens(requests), len(requests))
        self.counts = Counts(requests, arm, self.worker.replica)
        self.speakers: dict[RequestKey, Speaker] = {}
        self._on_progress = on_progress
        self._events: list[tuple[float, Event, int]] = []
        self._ended = 0

    def run(self) -> RunResult:
        """Until every answer has ended. Raises RanksDiffer."""
        worker = self.worker
        self.begin()
        now_ms = 0.0
        while True:
            self._take_events(now_ms)
            planned = worker.plan(now_ms)
            if planned is not None:
                self._watch(planned)
                now_ms += self.step_ms(planned, now_ms)
                keys = planned.work.batch.sample_requests if planned.work.batch is not None else ()
                for key in keys:
                    self.speakers[key].may_speak = True
                self._tell(self.speak(keys, now_ms), now_ms)
                continue
            nexts = [due for due in (self.next_event_ms, worker.next_ms) if due is not None]
            if not nexts:
                break
            now_ms = max(now_ms, min(nexts))
        assert self._ended == len(self.requests), "a request that never ends"
        worker.end()
        return self.counts.result(now_ms, self.service(now_ms))

    @abc.abstractmethod
    def begin(self) -> None:
        """Say when who arrives, as far as that is known."""

    @abc.abstractmethod
    def step_ms(self, planned: Planned, now_ms: float) -> float:
        """How long it takes until this plan, made now, is over and its tokens are told."""

    @abc.abstractmethod
    def speak(self, keys: Sequence[RequestKey], now_ms: float) -> Iterable[tuple[Speaker, int]]:
        """The step is over in which `keys` sampled: who tells how many tokens now."""

    def started_speaking(self, speaker: Speaker, now_ms: float) -> None:
        """Its first token is told."""
        return

    @abc.abstractmethod
    def ends_ms(self, speaker: Speaker, now_ms: float) -> float:
        """When the answer of a context leg ends whose prefill is done now."""

    def ended(self, index: int, now_ms: float) -> None:
        """Its answer is over."""
        return

    def service(self, now_ms: float) -> Service | None:
        return None

    def at(self, when_ms: float, event: Event, index: int) -> None:
        heapq.heappush(self._events, (when_ms, event, index))

    @property
    def next_event_ms(self) -> float | None:
        return self._events[0][0] if self._events else None

    def _take_events(self, now_ms: float) -> None:
        spoken: list[tuple[Speaker, int]] = []
        while self._events and self._events[0][0] <= now_ms:
            due_ms, event, index = heapq.heappop(self._events)
            match event:
                case Event.ARRIVES:
                    self._arrive(index, due_ms)
                case Event.SPEAKS:
                    # One that made way and came back is due twice, and may be over by now.
                    speaker = self.speakers.get(RequestKey(index + 1))
                    if speaker is not None and speaker.may_speak:
                        speaker.may_speak = False
                        spoken.append((speaker, max(1, speaker.left - 1)))
                case Event.IS_RELEASED:
                    self.worker.scheduler.released(RequestKey(index + 1))
                case Event.ENDS:
                    self._tell_end(index, due_ms)
        if spoken:
            self._tell(spoken, now_ms)

    def _arrive(self, index: int, now_ms: float) -> None:
        request = self.requests[index]
        self.counts.arrived(now_ms)
        key = RequestKey(index + 1)
        taken = self.worker.submit(
            Request(
                key=key,
                phase=PHASES[self.arm.role],
                token_ids=request.prompt,
                sampling=GREEDY,
                stopping=Stopping(max(2 if self.is_context else 1, request.output_tokens)),
                salt=f"play {request.play}".encode(),
                conversation=request.conversation,
                parent=request.parent if self.arm.hints.parent else None,
            )
        )
        self.arrived(index, now_ms)
        if not taken:
            self.counts.refused(index)
            self._end(index, now_ms)
            return
        # What is told last is never computed, so any token does where the recording has none.
        answer = [0] if self.is_context else request.answer.tolist() or [0]
        self.speakers[key] = Speaker(index, request, answer)

    def arrived(self, index: int, now_ms: float) -> None:
        """It is queued, or refused."""
        return

    def _tell(self, spoken: Iterable[tuple[Speaker, int]], now_ms: float) -> None:
        keys: list[RequestKey] = []
        tokens: list[int] = []
        for speaker, count in spoken:
            if not speaker.given:
                self.started_speaking(speaker, now_ms)
            keys += [RequestKey(speaker.index + 1)] * count
            tokens += speaker.take(count)
        self._hear(self.worker.complete(keys, tokens), now_ms)

    def _hear(self, told: Iterable[Output], now_ms: float) -> None:
        scheduler = self.worker.scheduler
        for output in told:
            if type(output) is TokenOut:
                continue
            if isinstance(output, Finished):
                speaker = self.speakers.pop(output.key)
                if self.arm.hints.stop or self.arm.hints.final:
                    self._tell_news(speaker.request)
                self._end(speaker.index, now_ms)
            elif isinstance(output, HandoffReady):
                speaker = self.speakers.pop(output.key)
                scheduler.heard(speaker.request.conversation, News.GENERATING, final=False)
                self.at(now_ms + HANDOFF_MS, Event.IS_RELEASED, speaker.index)
                self.at(max(now_ms + HANDOFF_MS, self.ends_ms(speaker, now_ms)), Event.ENDS, speaker.index)

    def _tell_end(self, index: int, now_ms: float) -> None:
        self._tell_news(self.requests[index])
        self._end(index, now_ms)

    def _tell_news(self, request: PlayedRequest) -> None:
        hints = self.arm.hints
        reason = REASONS[request.stop if hints.stop else None]
        final = request.is_last and hints.final
        self.worker.scheduler.heard(request.conversation, News.ENDED, reason, final=final)

    def _end(self, index: int, now_ms: float) -> None:
        self._ended += 1
        self.ended(index, now_ms)
        if self._ended % PROGRESS == 0 or self._ended == len(self.requests):
            self._on_progress(self._ended)

    def _watch(self, planned: Planned) -> None:
        plan = planned.plan
        self.counts.planned(plan)
        for act in plan.acts:
            if isinstance(act, Suspend):
                self.speakers[RequestKey(act.key)].may_speak = False


def _block_tokens(requests: Sequence[PlayedRequest]) -> int:
    """Raises ValueError where blocks differ in size, or nothing is played."""
    sizes = {request.block_tokens for request in requests}
    if len(sizes) != 1:
        raise ValueError(f"blocks of one size are due, not of {sorted(sizes)} tokens")
    return sizes.pop()
