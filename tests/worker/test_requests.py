"""Each owner hears of its own requests, each request ends once, and its id is free again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from worker.commands import Cancel, Command, PinEnded, Submit, Told
from worker.core.outputs import Failed, Finished, HandoffReady, Started, TokenOut
from worker.core.types import FinishReason, Phase, Request, RequestKey, Sampling, Stopping
from worker.refusal import Refused
from worker.requests import Active, Requests
from worker.telemetry import Metrics


@dataclass
class Owner:
    told: list[Told] = field(default_factory=list)
    flushes: int = 0

    def take(self, active: Active, output: Told) -> None:
        self.told.append(output)

    def flush(self) -> None:
        self.flushes += 1


@dataclass
class Table:
    posted: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requests = Requests(self.posted.append, Metrics())

    def accept(self, request_id: str, owner: Owner, phase: Phase = Phase.AGGREGATED) -> Active:
        key = self.requests.next_key()
        request = Request(key, phase, np.arange(8, dtype=np.int32), Sampling(), Stopping(4))
        return self.requests.accept(request, request_id, owner)


def test_outputs_reach_their_owner_and_each_owner_is_flushed_once_a_step() -> None:
    table, one, two = Table(), Owner(), Owner()
    first, second, third = table.accept("a", one), table.accept("b", one), table.accept("c", two)

    table.requests.deliver([TokenOut(active.key, 5) for active in (first, second, third)])

    assert ([told.key for told in one.told], one.flushes) == ([first.key, second.key], 1)
    assert ([told.key for told in two.told], two.flushes) == ([third.key], 1)


def test_an_id_is_in_use_until_its_request_ends() -> None:
    table = Table()
    active = table.accept("a", Owner())

    with pytest.raises(Refused, match="'a' is active"):
        table.requests.require_open("a")
    table.requests.deliver([Finished(active.key, FinishReason.LENGTH)])

    table.requests.require_open("a")
    assert table.requests.ended_lately("a")
    assert len(table.requests) == 0


def test_nothing_is_heard_of_a_cancelled_request() -> None:
    table, owner = Table(), Owner()
    active = table.accept("a", owner)

    table.requests.cancel(active)
    table.requests.deliver([TokenOut(active.key, 5)])

    assert owner.told == []
    assert table.posted[-1] == Cancel(active.key)


def test_a_context_leg_frees_its_id_when_it_answers_and_stays_until_its_pin_ends() -> None:
    table = Table()
    active = table.accept("a", Owner(), Phase.CONTEXT)

    table.requests.deliver([Started(active.key, 4), HandoffReady(active.key, 9, None, 4, 8)])
    table.requests.require_open("a")
    pinned = table.requests.find_pinned(active.key)
    table.requests.deliver([PinEnded(active.key)])

    assert pinned is active
    assert (active.cached_tokens, active.completion_tokens) == (4, 1)
    assert len(table.requests) == 0


def test_a_lost_group_fails_every_request_as_retryable_and_accepts_no_more() -> None:
    table, owner = Table(), Owner()
    active = table.accept("a", owner)

    table.requests.fail_all("rank 1 is gone")

    assert owner.told == [Failed(active.key, "INTERNAL", "rank 1 is gone", retryable=True)]
    with pytest.raises(Refused, match="rank 1 is gone"):
        table.requests.require_open("b")


def test_a_resumed_answer_counts_what_was_generated_before_as_completion() -> None:
    table = Table()
    request = Request(
        RequestKey(1), Phase.AGGREGATED, np.arange(8, dtype=np.int32), Sampling(), Stopping(9), resumed_tokens=3
    )

    active = table.requests.accept(request, "a", Owner())

    assert (active.prompt_tokens, active.completion_tokens) == (5, 3)
    assert table.posted == [Submit(request)]
