from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from openengine.v1 import kv_pb2
from worker.core.handoff import MAX_BYTES, HandoffError, KvShape, KvSource, SessionRef

SHAPE = KvShape(num_layers=30, num_kv_heads=3, head_dim=64, tokens_per_block=32, dtype="bfloat16")


def make_ref(**changes: Any) -> SessionRef:
    ref = SessionRef(
        session_id="0123456789abcdef" * 2,
        secret="fedcba9876543210" * 4,
        instance_id="worker-1",
        host_key="host-1",
        request_id=7,
        first_token=42,
        prompt_tokens=100,
        cached_prompt_tokens=64,
        shape=SHAPE,
        sources=(KvSource("10.0.0.1", 5000, 0, 2), KvSource("fd00::1", 5001, 2, 3)),
    )
    return dataclasses.replace(ref, **changes)


def test_a_reference_says_under_tensorrt_llms_names_what_it_has_names_for() -> None:
    message = make_ref().to_message()

    attributes = json_format.MessageToDict(message.attributes_struct)
    assert attributes["disagg_request_id"] == "7"
    assert attributes["first_gen_tokens"] == [42]
    assert attributes["ctx_dp_rank"] == 0
    assert attributes["ctx_usage"] == {"prompt_tokens": 100, "cached_prompt_tokens": 64}
    assert attributes["schedule_style"] == "context_first"
    assert attributes["ctx_info_endpoint"] == ["10.0.0.1:5000", "[fd00::1]:5001"]
    assert attributes["kinroute"]["head_starts"] == [0, 2, 3]
    assert [(one.host, one.port, one.protocol) for one in message.endpoints] == [
        ("10.0.0.1", 5000, "kinroute-tcp"),
        ("fd00::1", 5001, "kinroute-tcp"),
    ]


@given(
    request_id=st.integers(0, 2**64 - 1),
    first_token=st.integers(0, 2**31 - 1),
    prompt_tokens=st.integers(1, 2**40),
    cut=st.integers(1, 7),
    host_key=st.text("0123456789abcdef", max_size=32),
)
def test_a_reference_comes_back_whole_and_byte_for_byte(
    request_id: int, first_token: int, prompt_tokens: int, cut: int, host_key: str
) -> None:
    ref = make_ref(
        request_id=request_id,
        first_token=first_token,
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=prompt_tokens // 2,
        host_key=host_key,
        shape=dataclasses.replace(SHAPE, num_kv_heads=8),
        sources=(KvSource("127.0.0.1", 1, 0, cut), KvSource("::1", 65535, cut, 8)),
    )

    encoded = ref.encode()

    assert SessionRef.parse(encoded) == ref
    assert SessionRef.parse(encoded).encode() == encoded
    replayed = kv_pb2.KvSessionRef.FromString(encoded)
    assert SessionRef.read(replayed) == ref


def test_a_request_id_beyond_what_a_double_holds_is_exact() -> None:
    ref = make_ref(request_id=2**53 + 1)

    assert SessionRef.parse(ref.encode()).request_id == 2**53 + 1


def test_attributes_that_others_added_are_ignored() -> None:
    message = make_ref().to_message()
    message.attributes_struct.update({"draft_tokens": [1, 2], "opaque_state": "AAAA", "nothing": None, "yes": True})

    assert SessionRef.read(message) == make_ref()


def test_the_number_of_blocks_counts_a_partial_one() -> None:
    assert [make_ref(prompt_tokens=tokens).num_blocks for tokens in (1, 32, 33)] == [1, 1, 2]


def test_a_reference_does_not_print_its_secret() -> None:
    assert make_ref().secret not in repr(make_ref())


def test_a_group_of_32_ranks_fits() -> None:
    shape = dataclasses.replace(SHAPE, num_kv_heads=32)
    sources = tuple(KvSource("192.168.100.100", 65535, head, head + 1) for head in range(32))

    assert len(make_ref(shape=shape, sources=sources).encode()) <= MAX_BYTES


def set_attribute(*path: str, value: Any) -> Callable[[kv_pb2.KvSessionRef], None]:
    def change(message: kv_pb2.KvSessionRef) -> None:
        struct = message.attributes_struct
        for name in path[:-1]:
            struct = struct.fields[name].struct_value
        struct.update({path[-1]: value})

    return change


def drop_attribute(*path: str) -> Callable[[kv_pb2.KvSessionRef], None]:
    def change(message: kv_pb2.KvSessionRef) -> None:
        struct = message.attributes_struct
        for name in path[:-1]:
            struct = struct.fields[name].struct_value
        del struct.fields[path[-1]]

    return change


def set_member(name: str, value: Any) -> Callable[[kv_pb2.KvSessionRef], None]:
    return lambda message: setattr(message, name, value)


def set_endpoint(name: str, value: Any) -> Callable[[kv_pb2.KvSessionRef], None]:
    return lambda message: setattr(message.endpoints[1], name, value)


def nest(message: kv_pb2.KvSessionRef) -> None:
    value = struct_pb2.Value(number_value=1)
    for _ in range(40):
        value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))
    message.attributes_struct.fields["deep"].CopyFrom(value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (set_member("session_id", ""), "session_id"),
        (set_member("session_id", "../../etc"), "session_id"),
        (set_member("session_id", "A" * 32), "session_id"),
        (set_member("transfer_backend", "nixl"), "transfer_backend"),
        (set_member("dp_rank", 1), "dp_rank"),
        (set_endpoint("host", ""), "host"),
        (set_endpoint("port", 0), "port"),
        (set_endpoint("port", 65536), "port"),
        (set_endpoint("protocol", "http"), "protocol"),
        (lambda message: message.endpoints.pop(), "endpoints"),
        (lambda message: message.ClearField("endpoints"), "endpoints"),
        (lambda message: message.ClearField("attributes_struct"), "kinroute"),
        (set_attribute("kinroute", value="text"), "kinroute"),
        (set_attribute("kinroute", "secret", value="ab"), "secret"),
        (set_attribute("kinroute", "secret", value="g" * 64), "secret"),
        (drop_attribute("kinroute", "secret"), "secret"),
        (set_attribute("kinroute", "prompt_tokens", value=0), "prompt_tokens"),
        (set_attribute("kinroute", "prompt_tokens", value=1.5), "prompt_tokens"),
        (set_attribute("kinroute", "prompt_tokens", value=2.0**60), "prompt_tokens"),
        (set_attribute("kinroute", "prompt_tokens", value=True), "prompt_tokens"),
        (set_attribute("kinroute", "prompt_tokens", value=99), "ctx_usage"),
        (set_attribute("ctx_usage", "cached_prompt_tokens", value=101), "ctx_usage"),
        (set_attribute("kinroute", "num_layers", value=math.inf), "not finite"),
        (set_attribute("elsewhere", value={"a": [math.nan]}), "not finite"),
        (nest, "too deep"),
        (set_attribute("kinroute", "head_starts", value=[0, 3]), "2 endpoints"),
        (set_attribute("kinroute", "head_starts", value=[0, 0, 3]), "head_starts"),
        (set_attribute("kinroute", "head_starts", value=[0, 2, 4]), "head_starts"),
        (set_attribute("kinroute", "head_starts", value=[]), "head_starts"),
        (set_attribute("first_gen_tokens", value=[]), "first_gen_tokens"),
        (set_attribute("first_gen_tokens", value=[2.0**31]), "first_gen_tokens"),
        (set_attribute("disagg_request_id", value=7), "disagg_request_id"),
        (set_attribute("disagg_request_id", value="7x"), "disagg_request_id"),
        (set_attribute("padding", value="x" * 5000), "bytes"),
    ],
)
def test_an_altered_reference_is_refused_by_name_of_the_part(
    change: Callable[[kv_pb2.KvSessionRef], None], why: str
) -> None:
    message = make_ref().to_message()
    change(message)

    with pytest.raises(HandoffError, match=why) as refused:
        SessionRef.read(message)
    assert make_ref().secret not in str(refused.value)
    with pytest.raises(HandoffError, match=why):
        SessionRef.parse(message.SerializeToString())


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_refused_or_read_but_never_crash(encoded: bytes) -> None:
    with pytest.raises(HandoffError):
        SessionRef.parse(encoded)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float16"}, "dtype is float16 at the source and bfloat16 here"),
        ({"tokens_per_block": 16}, "tokens_per_block is 16 at the source and 32 here"),
    ],
)
def test_two_shapes_differ_in_a_part_that_is_named(change: dict[str, Any], why: str) -> None:
    assert SHAPE.differs_from(dataclasses.replace(SHAPE, **change)) == why
    assert SHAPE.differs_from(SHAPE) is None
