"""A sealed handoff reference is worth something to its own tenant, unchanged, for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from edge.core.errors import Code, EdgeError
from edge.core.seals import LIFE_S, MEMBER, Seals
from enginelink.envelope import LEEWAY_S, Key
from openengine.v1 import kv_pb2

NOW_S = 1_800_000_000.0
KEYS = (Key("old", b"o" * 32, 0.0), Key("new", b"n" * 32, NOW_S))
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def reference(**attributes: Any) -> kv_pb2.KvSessionRef:
    struct = struct_pb2.Struct()
    struct.update(attributes or {"disagg_request_id": "7", "first_gen_tokens": [3], "kinroute": {"secret": "s"}})
    return kv_pb2.KvSessionRef(
        session_id="a" * 32,
        transfer_backend="kinroute",
        endpoints=[kv_pb2.KvEndpoint(host="10.0.0.1", port=7000, protocol="kinroute-tcp")],
        attributes_struct=struct,
    )


def encoded(message: kv_pb2.KvSessionRef) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def sealed(message: kv_pb2.KvSessionRef | None = None, *, seals: Seals | None = None) -> kv_pb2.KvSessionRef:
    data = encoded(message or reference())
    return (seals or Seals(KEYS)).seal(data, tenant="acme", instance_id="worker-1", now_s=NOW_S)


def reason(
    message: kv_pb2.KvSessionRef, *, tenant: str = "acme", now_s: float = NOW_S, keys: Sequence[Key] = KEYS
) -> str:
    with pytest.raises(EdgeError) as caught:
        Seals(keys).open(message, tenant=tenant, now_s=now_s)
    assert caught.value.code is Code.INVALID
    assert caught.value.param == "kv.session"
    return caught.value.reason


@given(attributes=st.dictionaries(st.text(max_size=8).filter(lambda name: name != MEMBER), JSON, max_size=4))
def test_its_own_tenant_gets_the_workers_bytes_back(attributes: dict[str, Any]) -> None:
    before = reference(**attributes)

    through_a_client = kv_pb2.KvSessionRef.FromString(sealed(before).SerializeToString())
    opened = Seals(KEYS).open(through_a_client, tenant="acme", now_s=NOW_S + LIFE_S)

    assert opened.reference == encoded(before)
    assert opened.instance_id == "worker-1"


def test_bytes_that_are_not_canonical_come_back_all_the_same() -> None:
    one, two = (kv_pb2.KvSessionRef(session_id="s").SerializeToString(), b"\x20\x05")
    odd = two + one  # fields in another order than any encoder writes them

    message = Seals(KEYS).seal(odd, tenant="acme", instance_id="w", now_s=NOW_S)

    assert Seals(KEYS).open(message, tenant="acme", now_s=NOW_S).reference == odd


def test_a_reference_without_attributes_comes_back_without() -> None:
    bare = kv_pb2.KvSessionRef(session_id="s").SerializeToString()
    message = Seals(KEYS).seal(bare, tenant="acme", instance_id="w", now_s=NOW_S)

    assert Seals(KEYS).open(message, tenant="acme", now_s=NOW_S).reference == bare


def test_another_tenant_cannot_use_it() -> None:
    assert reason(sealed(), tenant="other") == "altered, or another tenant's"


def test_it_expires() -> None:
    assert reason(sealed(), now_s=NOW_S + LIFE_S + LEEWAY_S) == "expired"


def test_a_reference_without_a_seal_is_refused() -> None:
    assert "no seal" in reason(reference())


ALTERATIONS: dict[str, Callable[[kv_pb2.KvSessionRef], object]] = {
    "session": lambda message: setattr(message, "session_id", "b" * 32),
    "backend": lambda message: setattr(message, "transfer_backend", "other"),
    "host": lambda message: setattr(message.endpoints[0], "host", "evil.example"),
    "port": lambda message: setattr(message.endpoints[0], "port", 1),
    "another endpoint": lambda message: message.endpoints.append(kv_pb2.KvEndpoint(host="evil", port=1)),
    "rank": lambda message: setattr(message, "dp_rank", 1),
    "attribute": lambda message: message.attributes_struct.update({"disagg_request_id": "8"}),
    "another attribute": lambda message: message.attributes_struct.update({"more": 1}),
    "unknown field": lambda message: message.MergeFromString(b"\x9a\x06\x01x"),
    "expiry": lambda message: _in_seal(message, "expires", str(int(NOW_S) + 10_000)),
    "instance": lambda message: _in_seal(message, "instance", "worker-2"),
    "encoding": lambda message: _in_seal(message, "encoding", "AAAA"),
    "mac": lambda message: _in_seal(message, "mac", "0" * 64),
    "mac that is not ASCII": lambda message: _in_seal(message, "mac", "é"),
    "key": lambda message: _in_seal(message, "key", "old"),
}


def _in_seal(message: kv_pb2.KvSessionRef, name: str, value: str) -> None:
    message.attributes_struct.fields[MEMBER].struct_value.update({name: value})


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
def test_whatever_is_altered_it_is_refused(alter: Callable[[kv_pb2.KvSessionRef], object]) -> None:
    message = sealed()
    alter(message)

    reason(message)


@pytest.mark.parametrize("seal", [None, 3, "text", [], {"key": 7}, {}], ids=repr)
def test_a_seal_of_another_shape_is_no_seal(seal: Any) -> None:
    message = reference()
    message.attributes_struct.update({MEMBER: seal})

    assert "no seal" in reason(message)


def test_a_retired_key_opens_nothing_and_a_young_one_seals_nothing_yet() -> None:
    retired = (Key("new", b"n" * 32, 0.0, retire_at_s=NOW_S),)
    young = (Key("young", b"y" * 32, NOW_S + 300.0), Key("old", b"o" * 32, 0.0))

    assert "retired" in reason(sealed(), keys=retired)
    message = sealed(seals=Seals(young))
    assert message.attributes_struct.fields[MEMBER].struct_value.fields["key"].string_value == "old"


def test_new_keys_take_the_place_of_old_ones_while_it_runs() -> None:
    seals = Seals(KEYS[:1])
    message = sealed(seals=seals)
    seals.use(KEYS[1:])

    with pytest.raises(EdgeError):
        seals.open(message, tenant="acme", now_s=NOW_S)
    seals.use(KEYS)
    seals.open(message, tenant="acme", now_s=NOW_S)


def test_without_a_key_nothing_leaves() -> None:
    with pytest.raises(EdgeError) as caught:
        sealed(seals=Seals(()))
    assert caught.value.code is Code.NOT_IMPLEMENTED
