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
    leaves short prompts to the generation worker. `helper_key` is of another subject than the system's key."""

    system: System
    helper_key: str
    context: list[Part]
    turns: Part
    alone: Part


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("returned")
    model = make_tiny_model(folder / "tiny")
    with System(folder / "system", model) as system:
        helper_key = system.add_key("helper")
        context = [system.start_worker(f"context-{n}", role="context", kv_cache_config=CACHE) for n in (1, 2)]
        generation = system.start_worker(
            "generation", role="generation", kv_cache_config={"tokens_per_block": 16, "max_tokens": 16_384}
        )
        turns = system.start_edge("edge-turns", context, [generation], router={"type": "round_robin"})
        local = {"max_local_prefill_length": SHORT_TOKENS}
        alone = system.start_edge("edge-alone", context, [generation], conditional_disagg_config=local)
        system.wait_ready(*context, generation, turns, alone)
        yield Fleet(system, helper_key, context, turns, alone)


def ask(fleet: Fleet, edge: Part, text: str, conversation: str, parent: str | None = None) -> dict[str, Any]:
    """The receipt of one whole answer."""
    return ask_with(fleet.system.key, edge, text, conversation, {} if parent is None else {"parent-id": parent})[0]


def ask_with(key: str, edge: Part, text: str, conversation: str, hint: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The receipt of one whole answer, and its lineage token. `hint`: of our headers, without what all begin with."""
    said = {f"X-Kinroute-{name}": value for name, value in {"conversation-id": conversation, **hint}.items()}
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}", **said}
    answer = httpx.post(f"{edge.http}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = httpx.Response(200, content=answer.headers["x-kinroute-receipt"]).json()
    return receipt, answer.headers["x-kinroute-lineage"]


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


def test_a_child_under_another_subject_is_its_parents_by_a_token_and_by_no_name(fleet: Fleet) -> None:
    """Only whoever was given the token is demoted when the parent returns."""
    text = f"A third of its kind. {CHILDS_TASK}"
    _, token = ask_with(fleet.system.key, fleet.alone, f"Plan it. {CHILDS_TASK}", "p3", {})
    child, _ = ask_with(fleet.helper_key, fleet.alone, text, "c3", {"lineage": token})
    other, _ = ask_with(fleet.helper_key, fleet.alone, f"Unlike that. {text}", "c4", {"parent-id": "p3"})
    for receipt in (child, other):
        wait_for(fleet, receipt, "idle")

    ask(fleet, fleet.alone, "And now?", "p3")

    wait_for(fleet, child, "demoted")
    assert state_of(fleet, other) == "idle", "its p3 is the helper's own, and another conversation"
