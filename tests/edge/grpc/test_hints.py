"""Hints in metadata and `extra`: the same names, scopes and refusals as over HTTP, and the tenant's own cache."""

from __future__ import annotations

import grpc
import pytest

from openengine.v1 import generation_pb2
from tests.edge.grpc.harness import Client, FrontEnd, request
from tests.edge.http.harness import Script

INVALID = grpc.StatusCode.INVALID_ARGUMENT
OWN, PARENT, FINAL = "x-kinroute-conversation-id", "x-kinroute-parent-id", "x-kinroute-conversation-final"
TOKEN = "x-kinroute-lineage"


def conversation(edge: FrontEnd, client: Client, pairs: list[tuple[str, str]], **extra: object) -> str:
    """The conversation that the worker heard of."""
    client.answer(request(extra=extra), pairs)
    return edge.worker.orders[-1].lineage.conversation


def test_a_conversation_may_stand_in_extra_instead(edge: FrontEnd, client: Client) -> None:
    named = conversation(edge, client, [(OWN, "c")])

    assert conversation(edge, client, [], conversation_id="c") == named
    assert conversation(edge, client, [(OWN, "c")], conversation_id=" c ") == named
    assert conversation(edge, client, [], conversation_id="d") != named


def test_two_different_ids_of_one_conversation_are_invalid(edge: FrontEnd, client: Client) -> None:
    code, details = client.refused(request(extra={"conversation_id": "d"}), [(OWN, "c")])

    assert code == INVALID
    assert "conversation_id" in details


@pytest.mark.parametrize("conversation_id", ["x" * 257, "a\x00b"], ids=["long", "control characters"])
def test_an_id_that_no_header_could_hold_is_invalid_in_extra_too(client: Client, conversation_id: str) -> None:
    assert client.refused(request(extra={"conversation_id": conversation_id}))[0] == INVALID


def test_a_parent_is_believed_from_who_may_name_one(edge: FrontEnd, client: Client, other: Client) -> None:
    parent = conversation(edge, client, [(OWN, "p")])

    client.answer(request(extra={"conversation_id": "c"}), [(PARENT, "p"), (FINAL, "true")])
    lineage = edge.worker.orders[-1].lineage
    code, _ = other.refused(request(), [(OWN, "c"), (PARENT, "p")])

    assert (lineage.parent, lineage.family) == (parent, parent)
    assert lineage.final
    assert code == grpc.StatusCode.PERMISSION_DENIED


def test_a_lineage_token_comes_with_the_answer_and_proves_the_parent(edge: FrontEnd, client: Client) -> None:
    call = client.generate(request(), [(OWN, "p")])
    token = dict(call.initial_metadata())[TOKEN]
    list(call)
    parent = edge.worker.orders[-1].lineage.conversation

    client.answer(request(), [(OWN, "c"), (TOKEN, token)])

    assert edge.worker.orders[-1].lineage.parent == parent


def test_a_forged_token_is_invalid(client: Client) -> None:
    assert client.refused(request(), [(OWN, "c"), (TOKEN, "e30.e30.e30")])[0] == INVALID


def test_a_hint_goes_with_a_context_leg(edge: FrontEnd, client: Client) -> None:
    parent = conversation(edge, client, [(OWN, "p")])

    client.answer(request(extra={"request_type": "context_only"}), [(OWN, "c"), (PARENT, "p")])

    assert edge.worker.orders[-1].lineage.parent == parent


@pytest.mark.parametrize("name", ["kinroute-lineage", "x-kinroute-internal-parent", "openengine_parent"])
def test_internal_names_from_outside_say_nothing(edge: FrontEnd, client: Client, name: str) -> None:
    plain = conversation(edge, client, [(OWN, "c")])

    assert conversation(edge, client, [(OWN, "c"), (name, "forged")]) == plain
    assert edge.worker.orders[-1].lineage.parent is None


def test_a_routing_key_places_requests_that_name_no_conversation(edge: FrontEnd, client: Client) -> None:
    families = []
    for prompt, key in (("one", "k"), ("two", "k"), ("two", "l")):
        client.answer(request(prompt), [("openengine-routing-key", key)])
        families.append(edge.worker.orders[-1].lineage.family)

    assert families[0] == families[1] != families[2]


def test_a_callers_salt_only_narrows_its_tenants(edge: FrontEnd, client: Client, other: Client) -> None:
    salted = generation_pb2.KvOptions(cache_salt="mine")
    for caller, kv in ((client, None), (client, salted), (client, salted), (other, salted)):
        caller.answer(request(kv=kv))

    plain, own, again, theirs = [order.cache_salt for order in edge.worker.orders]
    assert own == again
    assert len({plain, own, theirs}) == 3


def test_trace_context_is_passed_on(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    client.answer(request(), [("traceparent", trace), ("tracestate", "a=b")])

    order = edge.worker.orders[-1]
    assert (order.traceparent, order.tracestate) == (trace, "a=b")
