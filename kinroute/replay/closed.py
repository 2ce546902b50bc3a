"""The closed loop: arrivals wait for answers, and steps cost what a model of costs says.

A step is a plan of the scheduler with a worker's limits, so prompts queue for compute and decode goes on beside them.
While nothing but decode happens, all that decode go on together until the next event or the next answer's end: such a
burst is one plan, which is what makes long answers cheap to simulate. In role context each answer is decoded alone by
a generation side that is never busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kinroute.replay.arm import HANDOFF_MS, Arm
from kinroute.replay.loop import Event, Loop, Speaker
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.results import Service
from kinroute.replay.service import CostModel
from kinroute.replay.simulated import Planned
from kinroute.replay.waits import waits_of
from worker.core.plan import Chunk, Plan, Sampled
from worker.core.step_load import StepLoad
from worker.core.types import RequestKey

IDLE_STEP_MS = 1.0
"""How long a step takes that computes nothing. An assumption."""


class ClosedLoop(Loop):
    def __init__(self, requests: Sequence[PlayedRequest], arm: Arm, on_progress: Callable[[int], None]) -> None:
        super().__init__(requests, arm, on_progress)
        self._warm = int(arm.warmup * len(requests))
        self._waits = waits_of(requests)
        self._left = [len(wait.ends) for wait in self._waits]
        """How many of the answers that each waits for have not ended."""
        self._behind_end: dict[int, list[int]] = {}
        self._behind_arrival: dict[int, list[int]] = {}
        self._burst = 1
        self._told: dict[RequestKey, int] = {}
        """How many tokens each was given last: so many of its tokens cost one decode."""
        self._arrived_ms = np.full(len(requests), math.nan)
        self._first_ms = np.full(len(requests), math.nan)
        self._last_end_ms = 0.0
        self._busy: list[tuple[float, float]] = []
        """When steps that compute began, and how long they took."""

    def begin(self) -> None:
        for index, wait in enumerate(self._waits):
            for before in wait.ends:
                self._behind_end.setdefault(before, []).append(index)
            if wait.arrival is not None:
                self._behind_arrival.setdefault(wait.arrival, []).append(index)
            elif not wait.ends:
                self.at(wait.after_s * 1000, Event.ARRIVES, index)

    def arrived(self, index: int, now_ms: float) -> None:
        self._arrived_ms[index] = now_ms
        for behind in self._behind_arrival.pop(index, ()):
            self.at(now_ms + self._waits[behind].after_s * 1000, Event.ARRIVES, behind)

    def ended(self, index: int, now_ms: float) -> None:
        self._last_end_ms = now_ms
        self._told.pop(RequestKey(index + 1), None)
        for behind in self._behind_end.pop(index, ()):
            self._left[behind] -= 1
            if not self._left[behind]:
                self.at(now_ms + self._waits[behind].after_s * 1000, Event.ARRIVES, behind)

    def step_ms(self, planned: Planned, now_ms: float) -> float:
        """Of the plan, and of the burst that follows it."""
        self._burst = 1
        batch = planned.work.batch
        if batch is None:
            return IDLE_STEP_MS
        load = self._load(planned.plan, batch.query_starts.tolist(), batch.context_lens.tolist())
        took_ms = 1000 * self.arm.costs.seconds(load)
        if _only_decodes(planned.plan, load):
            took_ms += self._burst_ms(load, [self.speakers[key] for key in batch.sample_requests], now_ms + took_ms)
        self._busy.append((now_ms, took_ms))
        return took_ms

    def _load(self, plan: Plan, starts: Sequence[int], contexts: Sequence[int]) -> StepLoad:
        """`starts`, `contexts`: of the batch, whose rows are the plan's chunks."""
        prefill = looked_at = decodes = decode_context = row = 0
        for act in plan.acts:
            if not isinstance(act, Chunk):
                continue
            count, context = starts[row + 1] - starts[row], contexts[row]
            row += 1
            if count <= self._told.get(RequestKey(act.key), 0):
                decodes += 1
                decode_context += context
            else:
                prefill += count
                looked_at += count * (2 * context - count + 1) // 2
        return StepLoad(prefill, looked_at, decodes, decode_context)

    def _burst_ms(self, load: StepLoad, speakers: Sequence[Speaker], begins_ms: float) -> float:
        """Everybody decodes on until something else is due; sets how many tokens each has then."""
        dues = [due for due in (self.next_event_ms, self.worker.next_ms) if due is not None]
        most = min(speaker.left for speaker in speakers) - 1
        # All tokens of a burst are computed by one plan.
        most = min(most, self.arm.costs.max_num_tokens // len(speakers) - 1)
        steps = most if not dues else min(most, steps_within((min(dues) - begins_ms) / 1000, load, self.arm.costs))
        if steps <= 0:
            return 0.0
        self._burst = 1 + steps
        return 1000 * seconds_of_burst(steps, load, self.arm.costs)

    def speak(self, keys: Sequence[RequestKey], now_ms: float) -> Iterable[tuple[Speaker, int]]:
        for key in keys:
            self._told[key] = self._burst
            yield self.speakers[key], self._burst

    def started_speaking(self, speaker: Speaker, now_ms: float) -> None:
        self._first_ms[speaker.index] = now_ms

    def ends_ms(self, speaker: Speaker, now_ms: float) -> float:
        request, costs = speaker.request, self.arm.costs
        more = max(0, request.output_tokens - 1)
        alone = StepLoad(decode_tokens=1, decode_context=request.num_prompt_blocks * request.block_tokens)
        return now_ms + HANDOFF_MS + 1000 * seconds_of_burst(more, alone, costs)

    def service(self, now_ms: float) -> Service | None:
        counted = self.requests[self._warm :]
        began_ms = float(np.nanmin(self._arrived_ms[self._warm :]))
        makespan_s = (self._last_end_ms - began_ms) / 1000
        waited_s = (self._first_ms - self._arrived_ms)[self._warm :] / 1000
        waited_s = waited_s[~np.isnan(waited_s)]
        p50, p99 = np.percentile(waited_s, (50, 99), method="inverted_cdf") if len(waited_s) else (0.0, 0.0)
        output = sum(max(1, request.output_tokens) for request in counted)
        busy_ms = sum(took for began, took in self._busy if began >= began_ms)
        whole_s = max(makespan_s, 1e-9)
        return Service(
            ttft_p50_s=float(p50),
            ttft_p99_s=float(p99),
            ttft_mean_s=float(waited_s.mean()) if len(waited_s) else 0.0,
            makespan_s=makespan_s,
            output_tokens=output,
            output_tokens_per_s=output / whole_s,
            requests_per_s=len(counted) / whole_s,
            busy_share=min(1.0, busy_ms / 1000 / whole_s),
        )


def _only_decodes(plan: Plan, load: StepLoad) -> bool:
    """Nothing in it would go on with the very next plan but decode."""
    return not load.prefill_tokens and all(
        isinstance(act, Sampled) or (isinstance(act, Chunk) and act.sample) for act in plan.acts
    )


def seconds_of_burst(steps: int, load: StepLoad, costs: CostModel) -> float:
    """Of so many steps after one that decoded `load`: each looks at one token more."""
    a, b = _growth(load, costs)
    return steps * (b + a * steps)


def steps_within(seconds: float, load: StepLoad, costs: CostModel) -> int:
    """How many of them, at most, take no longer."""
    if seconds <= 0.0:
        return 0
    a, b = _growth(load, costs)
    if a <= 0.0:
        return int(seconds / b) if b > 0.0 else 1 << 30
    return int((math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a))


def _growth(load: StepLoad, costs: CostModel) -> tuple[float, float]:
    """`a`, `b` of a burst's seconds, a n^2 + b n."""
    a = costs.decode_context_s * load.decode_tokens / 2
    first = costs.step_s + load.decode_tokens * costs.decode_token_s + load.decode_context * costs.decode_context_s
    return a, first + a
