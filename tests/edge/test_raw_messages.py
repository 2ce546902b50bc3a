"""References pass through as the bytes that they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.raw_messages import cannot_be_replayed, session_in, with_session
from openengine.v1 import generation_pb2, kv_pb2

SESSION = kv_pb2.KvSessionRef(session_id="s", transfer_backend="b", dp_rank=3)


def ready(session: kv_pb2.KvSessionRef) -> generation_pb2.GenerateResponse:
    usage = generation_pb2.Usage(prompt_tokens=300)
    prefill = generation_pb2.PrefillReady(kv_session=session)
    return generation_pb2.GenerateResponse(request_id="r", prefill_ready=prefill, usage=usage)


@given(st.text(max_size=300), st.integers(0, 2**32 - 1))
def test_the_reference_is_cut_out_of_the_response_as_it_came(name: str, rank: int) -> None:
    session = kv_pb2.KvSessionRef(session_id=name, transfer_backend="b", dp_rank=rank)

    assert session_in(ready(session).SerializeToString()) == session.SerializeToString()


@given(st.binary(max_size=60))
def test_any_bytes_give_a_reference_or_none(encoded: bytes) -> None:
    found = session_in(encoded)

    assert found is None or found in encoded


def test_two_references_and_none_are_no_reference() -> None:
    encoded = ready(SESSION).SerializeToString()

    assert session_in(encoded + encoded) is None
    assert session_in(generation_pb2.GenerateResponse(request_id="r").SerializeToString()) is None
    assert session_in(encoded[:-1]) is None


@given(st.text(min_size=1, max_size=300))
def test_a_reference_that_is_put_into_a_request_joins_its_other_kv_options(name: str) -> None:
    request = generation_pb2.GenerateRequest(request_id="r", kv=generation_pb2.KvOptions(cache_salt="salt"))
    session = kv_pb2.KvSessionRef(session_id=name).SerializeToString() + b"\xd8\x06\x07"

    encoded = with_session(request.SerializeToString(), session)

    read = generation_pb2.GenerateRequest.FromString(encoded)
    assert (read.kv.cache_salt, read.kv.session.session_id) == ("salt", name)
    assert encoded.endswith(session)


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"disagg_request_id": "5"}, None),
        ({"x": float("inf")}, "a number is not finite"),
        ({"x": [1, {"y": 2.0**53 + 2}]}, "an integer is past 2^53"),
        ({"x": 0.5}, None),
    ],
)
def test_what_not_every_client_could_carry_on_is_named(attributes: dict[str, Any], why: str | None) -> None:
    session = kv_pb2.KvSessionRef(session_id="s")
    session.attributes_struct.update(attributes)

    assert cannot_be_replayed(session) == why


def test_a_reference_needs_an_id_and_its_endpoints_a_port() -> None:
    assert cannot_be_replayed(kv_pb2.KvSessionRef()) == "it has no id"
    for endpoint in (kv_pb2.KvEndpoint(host="h"), kv_pb2.KvEndpoint(port=1), kv_pb2.KvEndpoint(host="h", port=70_000)):
        session = kv_pb2.KvSessionRef(session_id="s", endpoints=[endpoint])
        assert cannot_be_replayed(session) == "an endpoint lacks its host or port"


def test_a_reference_that_nests_without_end_is_refused() -> None:
    session = kv_pb2.KvSessionRef(session_id="s")
    deep: Any = 1.0
    for _ in range(20):
        deep = [deep]
    session.attributes_struct.update({"x": deep})

    assert cannot_be_replayed(session) == "it nests too deep"
