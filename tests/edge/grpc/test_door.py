"""Who gets in, and what those cost who should not: over real connections, while another tenant is served."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from edge.core.admission import AdmissionLimits
from edge.core.types import TenantLimits
from edge.settings import Limits
from openengine.v1 import service_pb2
from tests.edge.grpc.harness import DEADLINE_S, Client, FrontEnd, front_end, request, text_of, until
from tests.edge.http.harness import KEY, OTHER_KEY, Script

GENERATE = "/openengine.v1.Inference/Generate"
METHODS = [
    f"/openengine.v1.{service.name}/{method.name}"
    for service in service_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def raw(address: str, method: str, data: bytes, metadata: list[tuple[str, str]], **options: Any) -> tuple[Any, str]:
    """Status and details of a call whose message is `data`."""
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        plain: Any = channel
        call = plain.unary_stream(method)(data, metadata=metadata, timeout=DEADLINE_S, **options)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code(), call.details()


class Idle:
    """Calls of one connection that say nothing. They live on the server's loop: two loops do not go with grpc.aio."""

    def __init__(self, edge: FrontEnd, key: str, count: int) -> None:
        self._edge = edge
        self._calls: list[grpc.aio.StreamStreamCall[Any, Any]] = []
        edge.run(lambda: self._open(key, count))

    async def _open(self, key: str, count: int) -> None:
        self._channel = cast("Any", grpc.aio.insecure_channel(self._edge.address))
        method = self._channel.stream_stream(GENERATE)
        self._calls += [method(metadata=(("x-api-key", key),), timeout=DEADLINE_S) for _ in range(count)]

    def codes(self) -> list[grpc.StatusCode]:
        """How each ended, once all have."""

        async def ended() -> list[grpc.StatusCode]:
            return list(await asyncio.gather(*(call.code() for call in self._calls)))

        return sorted(self._edge.run(ended), key=lambda code: str(code.name))

    def close(self) -> None:
        self._edge.run(lambda: self._channel.close())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("metadata", [[], [("x-api-key", "kr-wrong")], [("authorization", "Basic x")]], ids=repr)
def test_no_method_is_for_strangers(edge: FrontEnd, method: str, metadata: list[tuple[str, str]]) -> None:
    code, details = raw(edge.address, method, b"", metadata)

    assert code == grpc.StatusCode.UNAUTHENTICATED
    assert "kr-" not in details


@pytest.mark.parametrize(
    "metadata", [[("x-api-key", KEY)], [("authorization", f"Bearer {KEY}")]], ids=["key", "bearer"]
)
def test_a_key_is_taken_as_over_http(edge: FrontEnd, metadata: list[tuple[str, str]]) -> None:
    code, _ = raw(edge.address, GENERATE, request().SerializeToString(), metadata)

    assert code == grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "pairs",
    [
        [("openengine-priority", "1"), ("openengine-priority", "1")],
        [("openengine-priority", "high")],
        [("openengine-target-dp-rank", "-1")],
        [("openengine-routing-key", "")],
    ],
    ids=repr,
)
def test_malformed_metadata_is_invalid_everywhere(edge: FrontEnd, method: str, pairs: list[tuple[str, str]]) -> None:
    code, details = raw(edge.address, method, b"", [("x-api-key", KEY), *pairs])

    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert pairs[0][0] in details


def test_priority_is_taken_and_counts_for_nothing_since_it_is_not_advertised(client: Client) -> None:
    assert text_of(client.answer(request(), [("openengine-priority", "100")])) == "Hello!"


def test_a_rank_that_there_is_not_is_invalid(client: Client) -> None:
    code, details = client.refused(request(), [("openengine-target-dp-rank", "3")])

    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "openengine-target-dp-rank" in details


def test_bytes_that_are_no_message_are_invalid(edge: FrontEnd) -> None:
    code, details = raw(edge.address, GENERATE, b"\xff" * 100, [("x-api-key", KEY)])

    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "openengine.v1.GenerateRequest" in details


def test_a_message_that_is_too_large_is_refused_unread(edge: FrontEnd) -> None:
    code, _ = raw(edge.address, GENERATE, bytes(64 << 20), [("x-api-key", KEY)])

    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_compressed_message_is_not_unpacked(edge: FrontEnd) -> None:
    code, _ = raw(edge.address, GENERATE, bytes(1 << 20), [("x-api-key", KEY)], compression=grpc.Compression.Gzip)

    assert code == grpc.StatusCode.UNIMPLEMENTED


def test_a_fault_of_our_own_tells_nothing(edge: FrontEnd, client: Client) -> None:
    def fault(order: object) -> Script:
        raise RuntimeError("secret detail")

    edge.worker.answer = fault
    edge.parts.catalogue.find, find = fault, edge.parts.catalogue.find  # type: ignore[method-assign, assignment]
    try:
        code, details = client.refused(request())
    finally:
        edge.parts.catalogue.find = find  # type: ignore[method-assign]

    assert (code, details) == (grpc.StatusCode.INTERNAL, "Something went wrong here.")


def test_a_thousand_idle_calls_of_one_key_do_not_keep_another_from_being_served(edge: FrontEnd, other: Client) -> None:
    idle = Idle(edge, KEY, 1000)
    until(lambda: edge.parts.admission.in_flight == 1000)

    assert text_of(other.answer(request())) == "Hello!"
    assert edge.parts.admission.in_flight == 1000
    idle.close()


def test_idle_calls_are_few_and_end_by_themselves(text_folder: Path) -> None:
    limits = Limits(tenant_requests=4, body_timeout_s=1.0)
    with front_end(text_folder, limits=limits) as edge, edge.client(OTHER_KEY) as other:
        idle = Idle(edge, KEY, 6)
        until(lambda: edge.parts.admission.in_flight == 4)
        assert text_of(other.answer(request())) == "Hello!"

        assert idle.codes() == [grpc.StatusCode.DEADLINE_EXCEEDED] * 4 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        idle.close()
        edge.settle()


def test_a_tenants_limits_hold_and_are_told(text_folder: Path) -> None:
    admission = AdmissionLimits(tenant=TenantLimits(requests_per_minute=1))
    with front_end(text_folder, admission=admission) as edge, edge.client() as client:
        first = client.generate(request())
        told = dict(first.initial_metadata())
        assert text_of(list(first)) == "Hello!"
        with pytest.raises(grpc.RpcError) as caught:
            client.answer(request())

    call: Any = caught.value
    trailing = dict(call.trailing_metadata())
    assert told["x-ratelimit-limit-requests"] == "1"
    assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(trailing["retry-after"]) >= 1
    assert trailing["x-ratelimit-remaining-requests"] == "0"


def test_health_and_reflection_ask_for_no_key(edge: FrontEnd) -> None:
    with grpc.insecure_channel(edge.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "openengine.v1.Inference", "openengine.v1.Control"):
            asked = health_pb2.HealthCheckRequest(service=service)
            until(lambda asked=asked: stub.Check(asked, timeout=5.0).status == serving)  # type: ignore[misc]
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"openengine.v1.Inference", "openengine.v1.Control"} <= set(database.get_services())
        assert database.FindFileContainingSymbol("openengine.v1.KvSessionRef").package == "openengine.v1"


def test_health_watches_the_workers(text_folder: Path) -> None:
    with front_end(text_folder, ready=False) as edge, grpc.insecure_channel(edge.address) as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        edge.run(lambda: edge.driver.fleet.joined(edge.worker.worker_id, "instance", 100))
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        states.cancel()
