"""Dice against a worker's gRPC listener: bytes, messages and metadata. Never INTERNAL, UNKNOWN or a hang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import hypothesis
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck
from hypothesis import strategies as st

from enginelink.v1 import link_pb2
from openengine.v1 import service_pb2
from tests.attacks import grpc_dice as dice
from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request
from tests.worker.running import Running, worker
from tests.worker.signed import KEY, write_keys

METHODS = dice.methods_of(
    *service_pb2.DESCRIPTOR.services_by_name.values(), *link_pb2.DESCRIPTOR.services_by_name.values()
)


def by_name(method: MethodDescriptor) -> str:
    return str(method.name)


def bounded(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


@dataclass(frozen=True)
class Target:
    running: Running
    channel: grpc.Channel


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("dice")
    keys = write_keys(folder / "keys.json")
    with (
        worker(folder, make_tiny_model(folder / "tiny"), keys_file=str(keys)) as running,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        running.wait_for("ready")
        yield Target(running, channel)


@pytest.fixture
def target(started: Target) -> Iterator[Target]:
    """After every test it serves, holds nothing, and has logged neither a secret nor an error of its own."""
    yield started
    with OpenEngine(started.running.grpc) as client:
        assert client.answer(generate_request([1, 2, 3]))[-1].WhichOneof("event") == "finished"
    started.running.wait_clean()
    log = started.running.child.log.read_text(errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
    assert KEY.secret.decode() not in log


@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_bytes_that_are_no_message_are_refused(target: Target, method: MethodDescriptor) -> None:
    @bounded(30)
    @hypothesis.given(st.binary(max_size=60), st.booleans())
    def fuzz(data: bytes, twice: bool) -> None:
        dice.require_fair(method, dice.call(target.channel, method, [data] * (1 + twice)))

    fuzz()


@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_any_message_is_served_or_refused(target: Target, method: MethodDescriptor) -> None:
    @bounded(40)
    @hypothesis.given(dice.messages(method.input_type), dice.metadata())
    def fuzz(message: Message, metadata: dice.Metadata) -> None:
        dice.require_fair(method, dice.call(target.channel, method, [message.SerializeToString()], metadata))

    fuzz()


def test_requests_with_anything_put_over_them_are_served_or_refused(target: Target) -> None:
    method = service_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name["Generate"]
    served = 0

    @bounded(200)
    @hypothesis.given(dice.changed_requests(), dice.metadata())
    def fuzz(message: Message, metadata: dice.Metadata) -> None:
        nonlocal served
        outcome = dice.call(target.channel, method, [message.SerializeToString()], metadata)
        dice.require_fair(method, outcome)
        served += bool(outcome.responses)

    fuzz()

    assert served > 10, "hardly more than refusals was looked at"
