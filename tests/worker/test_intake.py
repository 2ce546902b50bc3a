"""What a request on the wire says becomes what the core is told, or a refusal that names the field."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginelink.envelope import LIFE_S, PURPOSE_SUBMIT, Claims, Key, ReplayGuard, Signer
from enginelink.v1 import link_pb2
from tests.worker.clients import generate_request
from tests.worker.running import MODEL_NAME
from worker.affinity import AffinityHints
from worker.core.handoff import KvShape
from worker.core.networks import AllowedNetworks
from worker.core.types import Request, RequestKey, Retention, TokenRange
from worker.intake import Intake, Served
from worker.keys import WorkerKeys
from worker.lineage import Envelopes
from worker.metadata import Metadata
from worker.refusal import Refused

KEY = Key("one", b"1" * 32)
INSTANCE = "this-start"
PROMPT = np.arange(40, 60, dtype="<u4")
SHAPE = KvShape(num_layers=2, num_kv_heads=2, head_dim=16, tokens_per_block=4, dtype="float32")


SERVED = Served(MODEL_NAME, "context", 259, 512, frozenset({2}), SHAPE, AllowedNetworks())


@pytest.fixture
def keys(tmp_path: Path) -> WorkerKeys:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"envelope_keys": [{"id": "one", "secret": base64.b64encode(KEY.secret).decode()}]}))
    return WorkerKeys(file)


@pytest.fixture
def intake(keys: WorkerKeys) -> Intake:
    return Intake(SERVED, Envelopes(keys, INSTANCE, required=True))


def submitted(intake: Intake, **fields: Any) -> Request:
    given: dict[str, Any] = {
        "handle": 1,
        "request_id": "r",
        "model": MODEL_NAME,
        "phase": link_pb2.PHASE_CONTEXT,
        "token_ids": PROMPT.tobytes(),
        "conversation_id": "child",
    }
    return intake.from_submit(RequestKey(1), link_pb2.Submit(**(given | fields)))


def generated(intake: Intake, extra: dict[str, Any]) -> Request:
    message = generate_request(PROMPT.tolist(), extra={"conversation_id": "child", **extra})
    return intake.from_generate(RequestKey(1), message, PROMPT.astype(np.int32), Metadata())


def envelope(turn: str, tenant: str = "") -> str:
    now_s = int(time.time())
    claims = Claims(
        purpose=PURPOSE_SUBMIT,
        iss="edge",
        aud=INSTANCE,
        issued_s=now_s,
        expires_s=now_s + LIFE_S,
        jti=turn,
        request_id="r",
        request_type="context_only",
        model=MODEL_NAME,
        turn=turn,
        tenant=tenant,
        conversation="child",
        parent="p",
        prompt_sha256=hashlib.sha256(PROMPT.tobytes()).hexdigest(),
    )
    return Signer(KEY).sign(claims)


def test_the_turn_and_the_prompts_hash_reach_the_core_so_that_a_retry_is_known(intake: Intake) -> None:
    first, again = (submitted(intake, lineage=envelope(turn)) for turn in ("t", "u"))

    assert (first.turn, first.parent) == ("t", "p")
    assert first.prompt_hash == again.prompt_hash == hashlib.sha256(PROMPT.tobytes()).digest()


def test_a_conversation_without_an_envelope_has_the_hash_alone(intake: Intake) -> None:
    request = submitted(intake)

    assert (request.turn, len(request.prompt_hash)) == ("", 32)
    assert submitted(intake, conversation_id="").prompt_hash == b""


def test_tenants_take_turns_by_the_edges_tag_or_by_the_tenant_that_an_envelope_names(intake: Intake) -> None:
    assert submitted(intake, tenant_tag=b"tag").tenant == b"tag"
    assert submitted(intake).tenant == b""
    message = generate_request(PROMPT.tolist(), request_id="r", extra={"conversation_id": "child"})
    named = [
        intake.from_generate(
            RequestKey(1), message, PROMPT.astype(np.int32), Metadata(lineage=envelope(turn, tenant))
        ).tenant
        for turn, tenant in (("v", "acme"), ("w", "acme"), ("x", "other"))
    ]
    assert named[0] == named[1] != named[2]
    assert all(len(tag) == 8 for tag in named)


def test_a_tag_that_is_too_long_is_refused(intake: Intake) -> None:
    with pytest.raises(Refused, match="tenant_tag has 33 bytes: at most 32"):
        submitted(intake, tenant_tag=b"x" * 33)


def test_an_edges_retention_reaches_the_core(intake: Intake) -> None:
    ranges = [link_pb2.Retention.TokenRange(start=4, stop=8, priority=80, duration_ms=5)]
    ranges.append(link_pb2.Retention.TokenRange(start=8, priority=10))
    asked = link_pb2.Retention(ranges=ranges, decode_priority=0, decode_duration_ms=7)

    assert submitted(intake, retention=asked).retention == Retention(
        (TokenRange(4, 8, 80, 5), TokenRange(8, None, 10)), 0, 7
    )
    assert submitted(intake).retention is None


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (link_pb2.Retention(decode_priority=101), "retention.decode_priority is 101: 0 to 100"),
        (link_pb2.Retention(decode_duration_ms=1 << 40), "retention.decode_duration_ms is"),
        (
            link_pb2.Retention(ranges=[link_pb2.Retention.TokenRange(priority=101)]),
            r"retention.ranges\[0\].priority is 101: 0 to 100",
        ),
        (
            link_pb2.Retention(ranges=[link_pb2.Retention.TokenRange(start=4, stop=4)]),
            r"retention.ranges\[0\].stop is 4: above its start, 4",
        ),
        (link_pb2.Retention(ranges=[link_pb2.Retention.TokenRange()] * 65), "has 65 entries: at most 64"),
    ],
)
def test_a_wrong_retention_on_a_link_is_refused_by_name(intake: Intake, asked: link_pb2.Retention, told: str) -> None:
    with pytest.raises(Refused, match=told):
        submitted(intake, retention=asked)


def test_openengine_takes_a_retention_in_extra(intake: Intake) -> None:
    config = {"token_range_retention_configs": [{"token_start": 0, "token_end": 8, "priority": 5}]}

    assert generated(intake, {"kv_cache_retention_config": config}).retention == Retention((TokenRange(0, 8, 5),))
    assert generated(intake, {"kv_cache_retention_config": None}).retention is None
    assert generated(intake, {}).retention is None


def test_where_as_many_envelopes_live_as_can_be_remembered_only_requests_with_a_hint_are_refused(
    keys: WorkerKeys,
) -> None:
    intake = Intake(SERVED, Envelopes(keys, INSTANCE, required=True, guard=ReplayGuard(1)))
    submitted(intake, lineage=envelope("t"))

    with pytest.raises(Refused) as caught:
        submitted(intake, lineage=envelope("u"))

    assert caught.value.is_lineage
    assert submitted(intake).conversation == "child"


def test_conversations_of_peers_stand_apart_only_where_their_dialect_is_taken(keys: WorkerKeys, tmp_path: Path) -> None:
    file = tmp_path / "internal"
    file.write_text("secret")
    envelopes = Envelopes(keys, INSTANCE, required=True)
    taken, not_taken = Intake(SERVED, envelopes, AffinityHints(file)), Intake(SERVED, envelopes)

    assert generated(taken, {}).conversation == "peer:child"
    assert generated(not_taken, {}).conversation == "child"
    assert submitted(taken).conversation == "child", "who opened a link has proven to be an edge"


@pytest.mark.parametrize("config", [{"priority": 500}, "high", {"priority": float("nan")}])
def test_a_wrong_retention_in_extra_is_refused_by_name(intake: Intake, config: Any) -> None:
    with pytest.raises(Refused, match=r"extra\.kv_cache_retention_config"):
        generated(intake, {"kv_cache_retention_config": config})
