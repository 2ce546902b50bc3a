"""Control: what the edge says of itself, and who may see and end what."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from edge.core.types import FinishReason, Principal
from openengine.v1 import (
    error_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    server_pb2,
)
from tests.edge.fakes import Heard, make_turn
from tests.edge.grpc.harness import OPERATOR_KEY, VERSION, Client, FrontEnd, events_of, request, text_of, until
from tests.edge.http.harness import MAX_CONTEXT, MODEL, Script

DENIED = grpc.StatusCode.PERMISSION_DENIED
READY, NOT_READY = lifecycle_pb2.HEALTH_STATE_READY, lifecycle_pb2.HEALTH_STATE_NOT_READY
EVERYBODY = [("x-kinroute-all-tenants", "true")]


@pytest.fixture
def operator(edge: FrontEnd) -> Iterator[Client]:
    with edge.client(OPERATOR_KEY) as connected:
        yield connected


@pytest.fixture
def hold(edge: FrontEnd) -> Iterator[threading.Event]:
    """The worker says nothing before it is set."""
    held = threading.Event()
    edge.worker.answer = lambda order: Script(hold=held)
    yield held
    held.set()


def running(edge: FrontEnd, client: Client, request_id: str) -> Any:
    before = len(edge.worker.orders)
    call = client.generate(request(request_id=request_id))
    until(lambda: len(edge.worker.orders) == before + 1)
    return call


def test_what_it_says_of_itself_is_one_engine(client: Client) -> None:
    server = client.ask("GetServerInfo", server_pb2.GetServerInfoRequest())

    assert (server.engine_name, server.engine_version, server.instance_id) == ("kinroute", VERSION, "edge-test")
    assert server.engine_role == server_pb2.ENGINE_ROLE_AGGREGATED
    assert server.schema_revision == server.minimum_client_revision == 1
    assert list(server.supported_models) == [MODEL, "other-name"]
    assert server.capacity.kv_block_size == 4
    assert server.extra["trtllm_supports_subagent_affinity"] is False


def test_a_model_is_told_with_its_lengths_by_any_of_its_names(client: Client) -> None:
    for name in (MODEL, "other-name"):
        model = client.ask("GetModelInfo", model_pb2.GetModelInfoRequest(model=name))
        assert model.served_model_name == MODEL
        assert (model.max_context_length, model.max_output_tokens) == (MAX_CONTEXT, MAX_CONTEXT - 1)

    unknown = model_pb2.GetModelInfoRequest(model="unknown")
    assert client.refused(unknown, method="GetModelInfo")[0] == grpc.StatusCode.NOT_FOUND
    absent = model_pb2.GetModelInfoRequest()
    assert client.refused(absent, method="GetModelInfo")[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_load_is_the_fleets_and_a_single_workers_for_the_operator(
    edge: FrontEnd, client: Client, operator: Client, hold: threading.Event
) -> None:
    edge.run(lambda: edge.driver.fleet.reported(edge.worker.worker_id, 0, draining=False, blocks=(3, 10)))
    call = running(edge, client, "one")

    load = client.ask("GetLoad", server_pb2.GetLoadRequest())
    assert (load.running_requests, load.queued_requests) == (1, 0)
    assert (load.used_kv_blocks, load.total_kv_blocks) == (3, 10)
    assert not load.ranks
    per_rank = server_pb2.GetLoadRequest(include_per_rank=True)
    assert client.refused(per_rank, method="GetLoad")[0] == DENIED
    (rank,) = operator.ask("GetLoad", per_rank).ranks
    assert (rank.data_parallel_rank, rank.running_requests, rank.total_kv_blocks) == (0, 1, 10)
    hold.set()
    list(call)


def test_health_is_ready_and_its_probe_is_a_real_turn(edge: FrontEnd, client: Client) -> None:
    asked = lifecycle_pb2.HealthRequest(
        include_inference_probe=True, model=MODEL, role=server_pb2.ENGINE_ROLE_AGGREGATED
    )

    health = client.ask("Health", asked)

    assert health.state == READY
    checks = {check.name: check.state for check in health.checks}
    assert checks == dict.fromkeys(("grpc", "scheduler", "model", "role", "inference_probe"), READY)
    (order,) = edge.worker.orders
    assert (order.stops.max_tokens, order.bypass_prefix_cache, order.tenant) == (1, True, "acme")


@pytest.mark.parametrize(
    ("asked", "failing"),
    [({"model": "unknown"}, "model"), ({"role": server_pb2.ENGINE_ROLE_PREFILL}, "role")],
)
def test_health_is_not_ready_for_what_is_not_served(client: Client, asked: dict[str, Any], failing: str) -> None:
    health = client.ask("Health", lifecycle_pb2.HealthRequest(**asked))

    assert health.state == NOT_READY
    assert [check.name for check in health.checks if check.state == NOT_READY] == [failing]


def test_health_says_that_no_worker_is_ready(edge: FrontEnd, client: Client) -> None:
    edge.driver.fleet.lost(edge.worker.worker_id)
    try:
        health = client.ask("Health", lifecycle_pb2.HealthRequest(include_inference_probe=True))
        info = client.ask("GetModelInfo", model_pb2.GetModelInfoRequest(model=MODEL))
    finally:
        edge.driver.fleet.joined(edge.worker.worker_id, "instance", MAX_CONTEXT, 4)

    assert health.state == NOT_READY
    assert not info.HasField("max_context_length")


def test_a_probe_that_fails_says_why(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("", reason=FinishReason.LENGTH)

    health = client.ask("Health", lifecycle_pb2.HealthRequest(include_inference_probe=True))

    (probe,) = [check for check in health.checks if check.name == "inference_probe"]
    assert (probe.state, probe.message) == (NOT_READY, "it ended without a token")


def test_an_aborted_request_ends_with_one_error_and_ok(edge: FrontEnd, client: Client, hold: threading.Event) -> None:
    call = running(edge, client, "mine")

    answer = client.ask("Abort", lifecycle_pb2.AbortRequest(request_id="mine"))
    responses = list(call)

    assert answer.status == lifecycle_pb2.ABORT_STATUS_ABORTED
    assert events_of(responses) == ["error"]
    assert responses[0].error.code == error_pb2.ERROR_CODE_CANCELLED
    assert responses[0].usage.prompt_tokens == 2
    assert call.code() == grpc.StatusCode.OK
    again = client.ask("Abort", lifecycle_pb2.AbortRequest(request_id="mine"))
    assert again.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED


def test_an_answer_that_is_aborted_in_its_middle_keeps_what_was_said(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("x" * 400, step_s=0.01)
    call = client.generate(request(request_id="long", max_tokens=400))
    first = next(call)

    client.ask("Abort", lifecycle_pb2.AbortRequest(request_id="long"))
    responses = [first, *call]

    assert events_of(responses).count("error") == 1
    assert events_of(responses)[-1] == "error"
    assert len(text_of(responses)) == responses[-1].usage.completion_tokens


def test_another_tenants_request_is_not_known(
    edge: FrontEnd, client: Client, other: Client, operator: Client, hold: threading.Event
) -> None:
    call = running(edge, client, "mine")
    asked = lifecycle_pb2.AbortRequest(request_id="mine")

    assert other.refused(asked, method="Abort")[0] == grpc.StatusCode.NOT_FOUND
    assert operator.refused(asked, method="Abort")[0] == grpc.StatusCode.NOT_FOUND
    hold.set()
    assert text_of(list(call)) == "Hello!"


def test_all_requests_are_the_tenants_and_everybodys_for_the_operator(
    edge: FrontEnd, client: Client, other: Client, operator: Client, hold: threading.Event
) -> None:
    everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    own, theirs = running(edge, client, "one"), running(edge, other, "two")

    client.ask("Abort", everything)
    assert events_of(list(own)) == ["error"]
    assert len(edge.driver.running) == 1
    assert client.refused(everything, EVERYBODY, method="Abort")[0] == DENIED
    assert len(edge.driver.running) == 1
    operator.ask("Abort", everything)
    assert len(edge.driver.running) == 1
    operator.ask("Abort", everything, EVERYBODY)
    assert events_of(list(theirs)) == ["error"]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (lifecycle_pb2.AbortRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (lifecycle_pb2.AbortRequest(request_id="unknown"), grpc.StatusCode.NOT_FOUND),
        (lifecycle_pb2.AbortRequest(request_id=""), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_abort_needs_one_known_target(client: Client, asked: Any, code: grpc.StatusCode) -> None:
    assert client.refused(asked, method="Abort")[0] == code


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        ("LoadLora", lora_pb2.LoadLoraRequest()),
        ("UnloadLora", lora_pb2.UnloadLoraRequest()),
        ("ListLoras", lora_pb2.ListLorasRequest()),
    ],
)
def test_adapters_are_unimplemented(client: Client, method: str, asked: Any) -> None:
    assert client.refused(asked, method=method)[0] == grpc.StatusCode.UNIMPLEMENTED


def test_event_sources_are_the_operators_and_there_are_none(client: Client, operator: Client) -> None:
    asked = kv_pb2.GetKvEventSourcesRequest()

    assert client.refused(asked, method="GetKvEventSources")[0] == DENIED
    assert not operator.ask("GetKvEventSources", asked).sources
    wrong = kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=[1])
    assert operator.refused(wrong, method="GetKvEventSources")[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_all_requests_are_those_over_http_too(edge: FrontEnd, client: Client, hold: threading.Event) -> None:
    heard = edge.run(lambda: heard_from(edge))

    client.ask("Abort", lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()))

    assert heard.reason is FinishReason.CANCELLED


def heard_from(edge: FrontEnd) -> Heard:
    """What a turn is told that no gRPC call asked for."""
    heard = Heard()
    turn = dataclasses.replace(make_turn(), principal=Principal("acme", "ann", frozenset()))
    edge.driver.start(turn, heard)
    return heard
