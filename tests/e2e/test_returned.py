"""A parent's turn that its children's worker does not serve still demotes them there: real workers, a real edge."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.system import Part, System
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAIT_S = 60.0
SHORT_TOKENS = 100
CACHE: dict[str, Any] = {
    "tokens_per_block": 16,
    "max_tokens": 16_384,
    "block_reuse_config": {
        "policy": "per_conversation",
        "finished_subagent_priority": 1,
        "finished_subagent_min_idle_iterations": 0,
    },
}
CHILDS_TASK = "Read all of this before you answer, and keep it: it is long enough to be prefilled by a worker for that."


@dataclass(frozen=True)
class Fleet:
    """Two context workers behind edges that part a family: `turns` sends each turn to the next context worker, `alone`
    leaves short prompts to the generation worker."""

    system: System
    context: list[Part]
    turns: Part
    alone: Part


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("returned")
    model = make_tiny_model(folder / "tiny")
    with System(folder / "system", model) as system:
        context = [system.start_worker(f"context-{n}", role="context", kv_cache_config=CACHE) for n in (1, 2)]
        generation = system.start_worker(
            "generation", role="generation", kv_cache_config={"tokens_per_block": 16, "max_tokens": 16_384}
        )
        turns = system.start_edge("edge-turns", context, [generation], router={"type": "round_robin"})
        local = {"max_local_prefill_length": SHORT_TOKENS}
        alone = system.start_edge("edge-alone", context, [generation], conditional_disagg_config=local)
        system.wait_ready(*context, generation, turns, alone)
        yield Fleet(system, context, turns, alone)


def ask(fleet: Fleet, edge: Part, text: str, conversation: str, parent: str | None = None) -> dict[str, Any]:
    """The receipt of one whole answer."""
    headers = {"Authorization": f"Bearer {fleet.system.key}", "X-Kinroute-Conversation-ID": conversation}
    if parent is not None:
        headers["X-Kinroute-Parent-ID"] = parent
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = httpx.post(f"{edge.http}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = httpx.Response(200, content=answer.headers["x-kinroute-receipt"]).json()
    return receipt


def state_of(fleet: Fleet, receipt: dict[str, Any]) -> str:
    """Of the conversation of this receipt, at the worker that prefilled it."""
    part = next(one for one in fleet.context if one.grpc == receipt["context_worker"])
    told = httpx.get(f"{part.admin}/kinroute/v1/families?family={receipt['conversation']}", timeout=WAIT_S).json()
    return str(told["conversations"][0]["state"])


def wait_for(fleet: Fleet, receipt: dict[str, Any], state: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while (now := state_of(fleet, receipt)) != state:
        assert time.monotonic() < end_s, f"it is {now}, not {state}"
        time.sleep(0.05)


def test_a_parents_next_turn_on_the_other_context_worker_demotes_its_child_on_the_first(fleet: Fleet) -> None:
    first = ask(fleet, fleet.turns, "Plan the work.", "p1")
    child = ask(fleet, fleet.turns, CHILDS_TASK, "c1", "p1")
    assert child["context_worker"] != first["context_worker"]
    strangers = [ask(fleet, fleet.turns, CHILDS_TASK, f"s{n}", "another") for n in (1, 2)]
    wait_for(fleet, child, "idle")

    again = ask(fleet, fleet.turns, "Plan the work. And now?", "p1")

    assert again["context_worker"] == first["context_worker"], "not where the child is"
    wait_for(fleet, child, "demoted")
    assert [state_of(fleet, stranger) for stranger in strangers] == ["idle", "idle"], (
        "another parent's stay as they are"
    )


def test_a_parents_short_turn_on_the_generation_worker_alone_demotes_its_child(fleet: Fleet) -> None:
    child = ask(fleet, fleet.alone, f"Nothing of it is cached yet. {CHILDS_TASK}", "c2", "p2")
    wait_for(fleet, child, "idle")

    returned = ask(fleet, fleet.alone, "And now?", "p2")

    assert returned["context_worker"] == returned["generation_worker"], "no context worker saw this turn"
    wait_for(fleet, child, "demoted")
