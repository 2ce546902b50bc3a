"""A worker hears that a conversation's turn was served elsewhere: what it believes, and what it does then."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginelink.envelope import LIFE_S, PURPOSE_RETURN, PURPOSE_SUBMIT, Claims, Key, Signer
from enginelink.v1 import link_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import Edge, kinds, until
from tests.worker.running import MODEL_NAME, Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
KEY, STRANGERS_KEY = Key("one", b"1" * 32), Key("one", b"2" * 32)
PROMPT = list(range(40, 60))
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"envelope_keys": [{"id": "one", "secret": base64.b64encode(KEY.secret).decode()}]}))
    reuse = {
        "policy": "per_conversation",
        "finished_subagent_priority": 1,
        "finished_subagent_min_idle_iterations": 0,
    }
    cache = {"tokens_per_block": 4, "max_tokens": 4096, "block_reuse_config": reuse}
    model = make_tiny_model(folder / "model")
    with worker(folder, model, tensor_parallel_size=2, keys_file=str(keys), kv_cache_config=cache) as started:
        started.wait_for("ready")
        yield started


def sign(edge: Edge, key: Key = KEY, **changes: Any) -> str:
    now_s = int(time.time())
    claims: dict[str, Any] = {
        "purpose": PURPOSE_RETURN,
        "iss": "edge",
        "aud": edge.welcome.server.instance_id,
        "issued_s": now_s,
        "expires_s": now_s + LIFE_S,
        "jti": f"envelope-{next(numbers)}",
        "turn": f"turn-{next(numbers)}",
        "family": "parent",
    }
    return Signer(key).sign(Claims(**(claims | changes)))


def tell(edge: Edge, conversation: str, envelope: str) -> None:
    told = link_pb2.ConversationUpdate(conversation_id=conversation, returned=link_pb2.Returned(envelope=envelope))
    edge._out.put(link_pb2.EdgeMessage(updates=[told]))


def ask(edge: Edge, conversation: str, parent: str = "", prompt: list[int] = PROMPT) -> None:
    """One whole answer, on behalf of a conversation whose parent is proven."""
    request_id = f"request-{next(numbers)}"
    envelope = sign(
        edge,
        purpose=PURPOSE_SUBMIT,
        request_id=request_id,
        request_type="context_and_generation",
        model=MODEL_NAME,
        conversation=conversation,
        parent=parent,
        prompt_sha256=hashlib.sha256(np.array(prompt, "<u4").tobytes()).hexdigest(),
    )
    handle = edge.submit(
        prompt,
        link_pb2.PHASE_AGGREGATED,
        2,
        request_id=request_id,
        conversation_id=conversation,
        lineage=envelope,
    )
    assert kinds(edge.events(handle))[-1] == "finished"


def family(edge: Edge) -> tuple[str, str]:
    """A parent that this worker never saw, and its finished child, which owns blocks here."""
    parent, child = f"parent-{next(numbers)}", f"child-{next(numbers)}"
    ask(edge, child, parent, [next(numbers) % 200, *PROMPT])
    return parent, child


def seen(running: Running, conversation: str) -> Any:
    (found,) = running.get(f"/kinroute/v1/families?family={conversation}")["conversations"]
    return found["state"], found["priority"]


def test_a_signed_return_demotes_a_finished_child_of_a_parent_that_is_served_elsewhere(running: Running) -> None:
    with Edge(running.grpc) as edge:
        parent, child = family(edge)
        assert seen(running, child) == ("idle", [35, 35])

        tell(edge, parent, sign(edge, conversation=parent))

        until(lambda: seen(running, child) == ("demoted", [1, 1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": "another-worker"},
        {"expires_s": 1},
        {"conversation": "another"},
        {"purpose": PURPOSE_SUBMIT},
        {"key": STRANGERS_KEY},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_return_that_is_not_signed_for_this_worker_and_conversation_changes_nothing(
    running: Running, changes: dict[str, Any]
) -> None:
    """The survivor's own family beside it, which a true return does demote, shows that the false one was read."""
    with Edge(running.grpc) as edge:
        parent, child = family(edge)
        other_parent, other_child = family(edge)

        tell(edge, parent, sign(edge, **({"conversation": parent} | changes)))
        tell(edge, other_parent, sign(edge, conversation=other_parent))

        until(lambda: seen(running, other_child)[0] == "demoted")
        assert seen(running, child) == ("idle", [35, 35])


def test_a_replayed_return_does_not_demote_a_child_that_came_back(running: Running) -> None:
    with Edge(running.grpc) as edge:
        parent, child = family(edge)
        other_parent, other_child = family(edge)
        envelope = sign(edge, conversation=parent)
        tell(edge, parent, envelope)
        until(lambda: seen(running, child)[0] == "demoted")
        ask(edge, child, parent, [1, 2, 3, 4, 5, *PROMPT])

        tell(edge, parent, envelope)
        tell(edge, other_parent, sign(edge, conversation=other_parent))

        until(lambda: seen(running, other_child)[0] == "demoted")
        assert seen(running, child) == ("idle", [35, 35])


def test_one_turn_told_twice_is_one_return(running: Running) -> None:
    """Two edges may tell of two attempts at one turn; the parent is known here, so its last turn is."""
    with Edge(running.grpc) as edge:
        parent, child = family(edge)
        ask(edge, parent)
        tell(edge, parent, sign(edge, conversation=parent, turn="t"))
        until(lambda: seen(running, child)[0] == "demoted")
        ask(edge, child, parent, [1, 2, 3, 4, 6, *PROMPT])
        other_parent, other_child = family(edge)

        tell(edge, parent, sign(edge, conversation=parent, turn="t"))
        tell(edge, other_parent, sign(edge, conversation=other_parent))

        until(lambda: seen(running, other_child)[0] == "demoted")
        assert seen(running, child)[0] == "idle"


@pytest.mark.parametrize(
    "update",
    [
        {"closed": link_pb2.Closed()},
        {"ended": link_pb2.Ended(reason=link_pb2.STOP_REASON_END_OF_TURN, final=True)},
        {"generating": link_pb2.Generating()},
    ],
    ids=lambda update: next(iter(update)),
)
def test_what_another_link_says_of_a_conversation_changes_nothing(running: Running, update: dict[str, Any]) -> None:
    """It was not submitted there. Its own link is believed, which shows that such news is noticed."""
    with Edge(running.grpc) as edge, Edge(running.grpc) as other:
        _, child = family(edge)
        other_parent, other_child = family(other)

        other.tell(child, **update)
        tell(other, other_parent, sign(other, conversation=other_parent))

        until(lambda: seen(running, other_child)[0] == "demoted")
        assert seen(running, child) == ("idle", [35, 35])

        edge.tell(child, **update)
        until(lambda: seen(running, child)[0] == ("running" if "generating" in update else "final"))
