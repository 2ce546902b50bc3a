"""Edges follow what real workers cache: who holds a prompt attracts it, and who died holds nothing any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.system import Part, System
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAIT_S = 60.0
BLOCK = 16
CLEAR_GAIN = 64
CACHE = {"tokens_per_block": BLOCK, "max_tokens": 16_384}
ROUTER = {"clear_gain_tokens": CLEAR_GAIN}


@dataclass
class Fleet:
    """Two context workers that tell what they hold, and a generation worker that keeps no events."""

    system: System
    context: list[Part]
    generation: Part
    edge: Part

    def start_edge(self, name: str) -> Part:
        edge = self.system.start_edge(name, self.context, [self.generation], router=ROUTER)
        self.system.wait_ready(edge)
        return edge


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("kv-following")
    with System(folder / "system", make_tiny_model(folder / "tiny")) as system:
        context = [system.start_worker(f"context-{n}", role="context", kv_cache_config=CACHE) for n in (1, 2)]
        silent = CACHE | {"event_buffer_max_size": 0}
        generation = system.start_worker("generation", role="generation", kv_cache_config=silent)
        edge = system.start_edge("edge", context, [generation], router=ROUTER)
        system.wait_ready(*context, generation, edge)
        yield Fleet(system, context, generation, edge)


@dataclass(frozen=True)
class Answer:
    """`worker`: who prefilled it. `why`: the reason of that choice."""

    worker: str
    why: str
    attempts: int
    cached: int
    prompt_tokens: int


def ask(fleet: Fleet, text: str, conversation: str, *, edge: Part | None = None) -> Answer:
    edge = edge or fleet.edge
    headers = {"Authorization": f"Bearer {fleet.system.key}", "X-Kinroute-Conversation-ID": conversation}
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = httpx.post(f"{edge.http}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    listed = httpx.get(f"{edge.admin}/kinroute/v1/requests", timeout=WAIT_S).json()["requests"]
    record = next(one for one in listed if one["request_id"] == answer.headers["x-request-id"])
    [receipt] = record["receipts"]
    why = next(reason for reason in receipt["reasons"] if reason.startswith("context "))
    return Answer(receipt["context_worker"], why, receipt["attempts"], record["cached_tokens"], record["prompt_tokens"])


def favouring(fleet: Fleet, worker: Part, topic: str) -> str:
    """A conversation that goes to `worker` when nothing else counts: its first prompt is too short for that."""
    names = (f"{topic}-{number}" for number in range(64))
    return next(name for name in names if ask(fleet, "Hello.", name).worker == worker.grpc)


def long_text(topic: str) -> str:
    return f"All about {topic}. " + "Read this before you answer, and keep it in mind. " * 12


def metric(part: Part, name: str, **labels: str) -> float:
    text = httpx.get(f"{part.admin}/metrics", timeout=WAIT_S).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return next(one.value for one in samples if one.name == name and one.labels == labels)


def known(edge: Part, name: str, worker: Part) -> float:
    return metric(edge, f"kinroute_edge_kv_{name}", worker=worker.grpc)


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def put_in_cache(fleet: Fleet, worker: Part, topic: str) -> int:
    """Have `worker` prefill the long text, and the edge know of it; returns its whole blocks' tokens."""
    before = known(fleet.edge, "blocks", worker)
    first = ask(fleet, long_text(topic), favouring(fleet, worker, topic))
    assert first.worker == worker.grpc
    assert first.cached <= BLOCK, "but for how all prompts begin, it is new"
    tokens = first.prompt_tokens // BLOCK * BLOCK
    assert tokens > 2 * CLEAR_GAIN
    wait_until(lambda: known(fleet.edge, "blocks", worker) >= before + tokens // BLOCK - 2)
    return tokens


def test_a_prompt_that_one_worker_holds_attracts_another_conversation_that_begins_with_it(fleet: Fleet) -> None:
    holder, other = fleet.context
    held = put_in_cache(fleet, holder, "attraction")
    stranger = favouring(fleet, other, "stranger")

    drawn = ask(fleet, long_text("attraction") + "And now?", stranger)

    assert drawn.worker == holder.grpc
    assert "holds" in drawn.why
    assert held - 2 * BLOCK <= drawn.cached <= held, "all but the end of its one message"
    assert ask(fleet, long_text("something else") + "And now?", stranger).worker == other.grpc


def test_an_edge_that_starts_later_learns_by_a_snapshot_what_workers_hold(fleet: Fleet) -> None:
    holder, other = fleet.context
    put_in_cache(fleet, holder, "the past")
    stranger = favouring(fleet, other, "late")

    late = fleet.start_edge("edge-late")
    wait_until(lambda: known(late, "known", holder) == 1)
    drawn = ask(fleet, long_text("the past") + "And now?", stranger, edge=late)

    assert drawn.worker == holder.grpc
    assert drawn.cached > 2 * CLEAR_GAIN
    assert known(late, "snapshots_total", holder) == 1
    assert known(late, "blocks", holder) == known(fleet.edge, "blocks", holder)
    assert metric(holder, "kinroute_worker_kv_followers", protocol="enginelink") == 2


def test_a_worker_that_keeps_no_events_serves_and_counts_as_one_that_holds_nothing(fleet: Fleet) -> None:
    """The generation worker here: each answer of the other tests is its own."""
    answer = ask(fleet, long_text("silence"), "silent")

    assert answer.attempts == 1
    assert known(fleet.edge, "known", fleet.generation) == 0
    assert known(fleet.edge, "events_total", fleet.generation) == 0
    assert metric(fleet.generation, "kinroute_worker_kv_events_total") == 0


def test_a_worker_that_is_killed_leaves_no_ghosts_and_takes_no_other_request_along(fleet: Fleet) -> None:
    """Last: the worker that comes back in its place is another process."""
    holder, other = fleet.context
    put_in_cache(fleet, holder, "ghosts")
    stranger = favouring(fleet, other, "haunted")
    # No more than a worker keeps however idle the others are.
    near = [favouring(fleet, other, f"near-{number}") for number in range(3)]
    with ThreadPoolExecutor() as callers:
        running = [callers.submit(ask, fleet, long_text(name), name) for name in near]
        os.killpg(holder.child.pid, signal.SIGKILL)
        answers = [one.result() for one in running]
    assert {(one.worker, one.attempts) for one in answers} == {(other.grpc, 1)}

    listen = {"grpc": holder.grpc, "admin": holder.admin.removeprefix("http://")}
    again = fleet.system.start_worker("context-1-again", role="context", kv_cache_config=CACHE, listen=listen)
    fleet.system.wait_ready(again)
    wait_until(lambda: known(fleet.edge, "known", again) == 1)

    assert known(fleet.edge, "restarts_total", again) == 1
    assert known(fleet.edge, "blocks", again) == 0
    answer = ask(fleet, long_text("ghosts") + "And now?", stranger)
    assert (answer.worker, answer.attempts) == (other.grpc, 1), "where its family goes by itself"
    assert answer.cached < CLEAR_GAIN
