"""TensorRT-LLM's hint is signed as it signs it, and believed for the request that it was signed for alone."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from enginelink.trtllm_affinity import AUTH_KEY, ID_KEY, AffinityError, GrpcHint, HttpHint, Presented, verify

KEY = b"secret"
HINT = GrpcHint(model="m", conversation="child-a", parent="parent-1", request_id="42")
REQUEST: dict[str, Any] = {"model": "m", "conversation": "child-a", "request_id": "42"}


def http(conversation: str) -> HttpHint:
    return HttpHint("CONTEXT", "m", conversation, "parent-1", "context_only", 42)


@pytest.mark.parametrize(
    ("hint", "digest"),
    [
        (http("child-a"), "e7f4d672c3229e394c0d79008072ec0ee47d02731421e6f04ce4ca8170671ccd"),
        (HINT, "0c56dc3208abd53f1f1fcad2f5ada91dc4d30e576ed568175ea0ab2f548a8d47"),
        (http("kind-é"), "d673fa7cbbdf84b0ac9812e1269a604dff8917b40f93b3f03d1ee8abccad2ef9"),
        (
            GrpcHint(model="m", conversation="kind-é", parent="parent-1", request_id="42"),
            "4589462a4c65fdc5ca2bb6bc66e6b294218b318f6b18fb1f03d67927dd047e4d",
        ),
    ],
    ids=["http", "grpc", "http-non-ascii", "grpc-non-ascii"],
)
def test_the_vectors_come_out(hint: GrpcHint | HttpHint, digest: str) -> None:
    assert hint.sign(KEY) == f"sha256={digest}"
    verify(f"sha256={digest}", [KEY], hint)


def test_members_that_may_be_null_are_signed_as_null() -> None:
    hint = HttpHint("GENERATION", "m", "c", "p")
    text = (
        '{"conversation_id":"c","disagg_request_id":null,"model":"m","purpose":"x-trtllm-subagent-affinity-id",'
        '"request_type":null,"role":"GENERATION","subagent_affinity_id":"p"}'
    )

    assert hint.sign(KEY) == "sha256=" + hmac.new(KEY, text.encode(), hashlib.sha256).hexdigest()


@pytest.mark.parametrize("parent", [" p", "p ", "\tp", "", "  "])
def test_over_grpc_a_parent_is_refused_unless_trimmed(parent: str) -> None:
    with pytest.raises(AffinityError) as caught:
        GrpcHint("m", "c", parent, "1").sign(KEY)

    assert caught.value.reason == "untrimmed parent"


def test_over_http_both_sides_trim_it() -> None:
    assert HttpHint("CONTEXT", "m", "c", " p\t").sign(KEY) == HttpHint("CONTEXT", "m", "c", "p").sign(KEY)
    with pytest.raises(AffinityError):
        HttpHint("CONTEXT", "m", "c", "  ").sign(KEY)


@pytest.mark.parametrize("conversation", ["", "  "])
def test_a_parent_of_no_conversation_is_refused(conversation: str) -> None:
    with pytest.raises(AffinityError) as caught:
        GrpcHint("m", conversation, "p", "1").sign(KEY)

    assert caught.value.reason == "no conversation"


def test_a_hint_that_was_sent_is_believed_for_its_request() -> None:
    presented = Presented.read([("other", "x"), *HINT.metadata(KEY)])

    assert presented is not None
    presented.verify([b"another", KEY], **REQUEST)


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"conversation": "child-b"}, {"request_id": "43"}],
    ids=lambda change: next(iter(change)),
)
def test_it_is_worth_nothing_for_another_request(change: dict[str, Any]) -> None:
    presented = Presented.read(HINT.metadata(KEY))
    assert presented is not None

    with pytest.raises(AffinityError) as caught:
        presented.verify([KEY], **(REQUEST | change))

    assert caught.value.reason == "bad signature"


@pytest.mark.parametrize(
    "auth", ["", "sha256=", HINT.sign(KEY).upper(), HINT.sign(KEY)[7:], HINT.sign(KEY)[:-1], HINT.sign(b"x"), "é"]
)
def test_a_signature_that_is_not_the_one_is_refused(auth: str) -> None:
    with pytest.raises(AffinityError):
        Presented("parent-1", auth).verify([KEY], **REQUEST)


def test_without_a_key_nothing_is_believed() -> None:
    with pytest.raises(AffinityError):
        Presented("parent-1", HINT.sign(KEY)).verify([], **REQUEST)


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([(ID_KEY, "p")], "incomplete"),
        ([(AUTH_KEY, "sha256=0")], "incomplete"),
        ([(ID_KEY, "p"), (ID_KEY, "p"), (AUTH_KEY, "sha256=0")], "repeated"),
        ([(ID_KEY, "p"), (AUTH_KEY, "a"), (AUTH_KEY, "a")], "repeated"),
        ([(ID_KEY, "p" * 257), (AUTH_KEY, "a")], "long parent"),
    ],
)
def test_half_a_hint_two_of_them_or_a_long_one_is_refused(pairs: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(AffinityError) as caught:
        Presented.read(pairs)

    assert caught.value.reason == reason


def test_no_hint_is_none() -> None:
    assert Presented.read([("traceparent", "x")]) is None


def test_what_metadata_cannot_carry_is_not_sent() -> None:
    with pytest.raises(AffinityError):
        GrpcHint("m", "c", "é", "1").metadata(KEY)
