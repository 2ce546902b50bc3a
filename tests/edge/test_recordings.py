"""A recording's queue: bounded, and honest about what did not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge.core.life_events import Phase
from edge.core.types import FinishReason
from edge.ended import EndedTurn, EndListener
from edge.recordings import Recording, Recordings
from tests.edge.fakes import make_turn

pytestmark = pytest.mark.anyio
SALT = b"s" * 32


def ended(prompt: int = 3) -> EndedTurn:
    return EndedTurn(make_turn(prompt=range(prompt)), Phase.AGGREGATED, 0.0, 1.0, FinishReason.STOP, 5)


async def told(recording: Recording) -> list[dict[str, Any]]:
    recording.stop()
    return [json.loads(line) async for line in recording.lines()]


async def test_turns_that_a_slow_follower_does_not_take_are_counted() -> None:
    recording = Recording(SALT, 2, max_waiting=2)
    for _ in range(5):
        recording.ended(ended())

    hello, *turns, over = await told(recording)

    assert (hello["lost"], len(turns), over["lost"], over["over"]) == (3, 2, 3, True)


async def test_prompts_that_wait_are_bounded_by_their_size() -> None:
    recording = Recording(SALT, 2, max_waiting_bytes=100_000)
    recording.ended(ended(20_000))
    recording.ended(ended(20_000))

    assert [line["prompt_tokens"] for line in await told(recording) if "t" in line] == [20_000]


async def test_an_edge_that_stops_tells_what_waits_and_then_the_end() -> None:
    listeners: list[EndListener] = []
    recordings = Recordings(listeners, b"id key")
    recording = recordings.begin(SALT, 2)
    assert recording is not None
    for listener in listeners:
        listener.ended(ended())
    recordings.stop()

    lines = [json.loads(line) async for line in recording.lines()]

    assert ["t" in line for line in lines] == [False, True, False]
    recordings.end(recording)
    assert not listeners
