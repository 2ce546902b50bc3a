"""Plays a load against the scheduler and the replica that workers run, in simulated time.

The open loop: a request arrives when it was recorded and is prefilled in steps of 30 ms, none of which is ever full;
its answer ends when it was recorded to, and never before its prefill. Until then all of it is held. All tokens of an
answer but the last come together, one step before its end: of what lies between, nothing but pages held would depend.
The closed loop is `kinroute.replay.closed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kinroute.replay.arm import STEP_MS
from kinroute.replay.arm import Arm as Arm
from kinroute.replay.closed import ClosedLoop
from kinroute.replay.loop import Event, Loop, Speaker
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.results import RunResult
from kinroute.replay.simulated import Planned
from worker.core.types import RequestKey


def simulate(requests: Sequence[PlayedRequest], arm: Arm, on_progress: Callable[[int], None]) -> RunResult:
    """`requests` by arrival; `on_progress` hears how many have ended, now and then.

    Raises ValueError where the arm cannot be, RanksDiffer where a rank decides otherwise than rank 0.
    """
    loop = ClosedLoop if arm.closed_loop else OpenLoop
    return loop(requests, arm, on_progress).run()


class OpenLoop(Loop):
    def begin(self) -> None:
        for index, request in enumerate(self.requests):
            self.at(request.t_s * 1000, Event.ARRIVES, index)

    def step_ms(self, planned: Planned, now_ms: float) -> float:
        return STEP_MS

    def speak(self, keys: Sequence[RequestKey], now_ms: float) -> Iterable[tuple[Speaker, int]]:
        for key in keys:
            speaker = self.speakers[key]
            if self.is_context or (speaker.left == 1 and speaker.given):
                yield speaker, 1
                continue
            ends_ms = self.ends_ms(speaker, now_ms)
            speaks_ms = ends_ms if speaker.left == 1 else ends_ms - STEP_MS
            if speaks_ms > now_ms:
                self.at(speaks_ms, Event.SPEAKS, speaker.index)
            else:
                yield speaker, max(1, speaker.left - 1)

    def ends_ms(self, speaker: Speaker, now_ms: float) -> float:
        return (speaker.request.t_s + speaker.request.duration_s) * 1000
