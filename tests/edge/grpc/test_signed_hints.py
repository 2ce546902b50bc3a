"""TensorRT-LLM's signed hint: from whom, on what, and under whose key it names a parent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from edge.grpc.signed_hints import SignedHints
from enginelink.trtllm_affinity import AUTH_KEY, ID_KEY, GrpcHint
from openengine.v1 import server_pb2
from tests.edge.grpc.harness import Client, FrontEnd, front_end, request
from tests.edge.http.harness import MODEL, OTHER_KEY

INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED
KEY = b"orchestrator's own secret"
CONTEXT = {"request_type": "context_only", "conversation_id": "child"}
HINT = GrpcHint(MODEL, "child", "parent", "42")


@pytest.fixture(scope="module")
def taking(text_folder: Path) -> Iterator[FrontEnd]:
    """It takes hints of the tenant acme, and of other's who signs with another key."""
    with front_end(text_folder, signed_hints=SignedHints({"other": b"other", "acme": KEY})) as running:
        yield running


@pytest.fixture
def caller(taking: FrontEnd) -> Iterator[Client]:
    taking.worker.orders.clear()
    with taking.client() as connected:
        yield connected


def signed(hint: GrpcHint = HINT, key: bytes = KEY) -> list[tuple[str, str]]:
    return list(hint.metadata(key))


def test_a_signed_parent_is_the_parent_of_that_name(taking: FrontEnd, caller: Client) -> None:
    caller.answer(request(), [("x-kinroute-conversation-id", "parent")])
    caller.answer(request(request_id="42", extra=CONTEXT), signed())

    parent, child = (order.lineage for order in taking.worker.orders)
    assert [child.parent, str(child.family)] == [parent.conversation, parent.conversation]


def test_that_it_is_taken_is_advertised(caller: Client) -> None:
    info = caller.ask("GetServerInfo", server_pb2.GetServerInfoRequest())

    assert info.extra["trtllm_supports_subagent_affinity"] is True


@pytest.mark.parametrize(
    "pairs",
    [
        signed(key=b"another"),
        signed(replace(HINT, request_id="43")),
        signed(replace(HINT, conversation="other")),
        signed(replace(HINT, model="other-name")),
        [(ID_KEY, "forged"), signed()[1]],
        signed()[:1],
        signed()[1:],
        signed() + signed()[:1],
        [(ID_KEY, "parent"), (AUTH_KEY, "")],
        [*signed(), ("x-kinroute-parent-id", "another")],
    ],
    ids=[
        "another key",
        "another request",
        "another conversation",
        "another model",
        "another parent",
        "no signature",
        "no parent",
        "twice",
        "empty signature",
        "two parents",
    ],
)
def test_what_is_not_signed_for_this_request_is_invalid(
    taking: FrontEnd, caller: Client, pairs: list[tuple[str, str]]
) -> None:
    code, details = caller.refused(request(request_id="42", extra=CONTEXT), pairs)

    assert code == INVALID
    assert "sha256" not in details
    assert not taking.worker.orders


@pytest.mark.parametrize("request_type", ["context_and_generation", ""])
def test_it_goes_with_context_requests_alone(caller: Client, request_type: str) -> None:
    extra = CONTEXT | {"request_type": request_type}

    assert caller.refused(request(request_id="42", extra=extra), signed())[0] == INVALID


def test_a_key_is_worth_something_within_its_tenant_and_the_scope_alone(taking: FrontEnd, caller: Client) -> None:
    with taking.client(OTHER_KEY) as other:
        code, _ = other.refused(request(request_id="42", extra=CONTEXT), signed(key=b"other"))

    assert code == DENIED
    assert caller.refused(request(request_id="42", extra=CONTEXT), signed(key=b"other"))[0] == INVALID


def test_without_a_key_no_signature_is_believed(edge: FrontEnd, client: Client) -> None:
    assert client.refused(request(request_id="42", extra=CONTEXT), signed())[0] == INVALID
    assert not edge.worker.orders


def test_a_new_key_takes_the_place_of_the_old_one(text_folder: Path) -> None:
    hints = SignedHints({"acme": KEY})
    with front_end(text_folder, signed_hints=hints) as edge, edge.client() as client:
        hints.use("acme", b"new")
        assert client.refused(request(request_id="42", extra=CONTEXT), signed())[0] == INVALID
        client.answer(request(request_id="42", extra=CONTEXT), signed(key=b"new"))
