"""Dice against the gRPC listener of a real edge, with a key and without. Never INTERNAL, UNKNOWN or a hang."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import hypothesis
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck
from hypothesis import strategies as st

from openengine.v1 import service_pb2
from tests.attacks import grpc_dice as dice
from tests.attacks.callers import ANN, OPERATOR, PROMPT, Caller
from tests.attacks.doors import Doors

METHODS = dice.methods_of(*service_pb2.DESCRIPTOR.services_by_name.values())
GENERATE = service_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name["Generate"]


def by_name(method: MethodDescriptor) -> str:
    return str(method.name)


def bounded(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.fixture
def channel(doors: Doors) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(doors.edge.grpc) as channel:
        yield channel


@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel, method: MethodDescriptor) -> None:
    @bounded(30)
    @hypothesis.given(st.binary(max_size=60), st.sampled_from((ANN, OPERATOR)))
    def fuzz(data: bytes, caller: Caller) -> None:
        dice.require_fair(method, dice.call(channel, method, [data], caller.metadata))

    fuzz()


@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_without_a_key_nothing_is_read(channel: grpc.Channel, method: MethodDescriptor) -> None:
    @bounded(15)
    @hypothesis.given(st.binary(max_size=60), dice.metadata())
    def fuzz(data: bytes, metadata: dice.Metadata) -> None:
        outcome = dice.call(channel, method, [data], metadata)
        assert outcome.code is grpc.StatusCode.UNAUTHENTICATED
        assert not outcome.responses

    fuzz()


@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_any_message_is_served_or_refused(channel: grpc.Channel, method: MethodDescriptor) -> None:
    @bounded(40)
    @hypothesis.given(dice.messages(method.input_type), dice.metadata(), st.sampled_from((ANN, OPERATOR)))
    def fuzz(message: Message, metadata: dice.Metadata, caller: Caller) -> None:
        sent = [*caller.metadata, *metadata]
        dice.require_fair(method, dice.call(channel, method, [message.SerializeToString()], sent))

    fuzz()


def test_requests_with_anything_put_over_them_are_served_or_refused(channel: grpc.Channel) -> None:
    served = 0

    @bounded(200)
    @hypothesis.given(dice.changed_requests(), dice.metadata())
    def fuzz(message: Message, metadata: dice.Metadata) -> None:
        nonlocal served
        outcome = dice.call(channel, GENERATE, [message.SerializeToString()], [*ANN.metadata, *metadata])
        dice.require_fair(GENERATE, outcome)
        served += bool(outcome.responses)

    fuzz()

    assert served > 10, "hardly more than refusals was looked at"


@pytest.mark.parametrize("field", ["model", "request_id", "prompt"])
def test_what_a_request_says_is_not_logged(channel: grpc.Channel, field: str) -> None:
    changes = {field: PROMPT if field == "prompt" else PROMPT * 20}
    message = dice.right_request(**changes).SerializeToString()

    dice.require_fair(GENERATE, dice.call(channel, GENERATE, [message], ANN.metadata))
