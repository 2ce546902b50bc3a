"""Hints of lineage to a real worker, over both protocols: proven ones count, others are refused, and change nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from enginelink.envelope import LIFE_S, PURPOSE_LINK, PURPOSE_RETURN, PURPOSE_SUBMIT, Claims, Key, Signer, prompt_sha256
from enginelink.trtllm_affinity import AUTH_KEY, CAPABILITY, ID_KEY, GrpcHint
from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, server_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import Edge, OpenEngine, generate_request
from tests.worker.running import MODEL_NAME, Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
KEY, RETIRED, UNKNOWN = Key("one", b"1" * 32), Key("old", b"2" * 32), Key("two", b"3" * 32)
PUBLIC = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
PEM = PUBLIC.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
AFFINITY_KEY = b"an internal key"
PROMPT = list(range(40, 52))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    keys, internal = folder / "keys.json", folder / "internal"
    entries = [
        {"id": KEY.key_id, "secret": base64.b64encode(KEY.secret).decode()},
        {"id": RETIRED.key_id, "secret": base64.b64encode(RETIRED.secret).decode(), "retire_at": time.time() - 1},
    ]
    keys.write_text(json.dumps({"envelope_keys": entries}))
    internal.write_bytes(AFFINITY_KEY + b"\n")
    cache = {"tokens_per_block": 4, "max_tokens": 4096, "block_reuse_config": {"policy": "per_conversation"}}
    with worker(
        folder,
        make_tiny_model(folder / "model"),
        keys_file=str(keys),
        internal_request_auth_key_file=str(internal),
        kv_cache_config=cache,
    ) as started:
        started.wait_for("ready")
        yield started


@dataclass(frozen=True)
class Told:
    """How a request ended. `code`: of the refusal, empty where it was served."""

    code: str = ""
    is_lineage: bool = False


Ask = Callable[..., Told]


def over_link(address: str, envelope: str, conversation: str, request_id: str, prompt: Sequence[int]) -> Told:
    with Edge(address) as edge:
        handle = edge.submit(
            prompt,
            link_pb2.PHASE_AGGREGATED,
            1,
            request_id=request_id,
            conversation_id=conversation,
            lineage=envelope,
        )
        last = edge.events(handle)[-1]
    if last.HasField("error"):
        return Told(error_pb2.ErrorCode.Name(last.error.code).removeprefix("ERROR_CODE_"), last.lineage_refused)
    return Told()


def over_openengine(address: str, envelope: str, conversation: str, request_id: str, prompt: Sequence[int]) -> Told:
    request = generate_request(prompt, 1, request_id=request_id, extra={"conversation_id": conversation})
    return generated(address, request, [("kinroute-lineage", envelope)])


def generated(address: str, request: Any, metadata: Sequence[tuple[str, str]]) -> Told:
    with OpenEngine(address) as client:
        try:
            list(client.generate(request, metadata))
        except grpc.RpcError as error:
            call: Any = error
            return Told(call.code().name, ("kinroute-refused", "lineage") in call.trailing_metadata())
    return Told()


@pytest.fixture(params=[over_link, over_openengine])
def ask(request: pytest.FixtureRequest, running: Running) -> Ask:
    def ask(envelope: str, conversation: str, request_id: str, prompt: Sequence[int] = PROMPT) -> Told:
        told: Told = request.param(running.grpc, envelope, conversation, request_id, prompt)
        return told

    return ask


def claims_for(running: Running, conversation: str, request_id: str, /, **changes: Any) -> Claims:
    now_s = int(time.time())
    claims: dict[str, Any] = {
        "purpose": PURPOSE_SUBMIT,
        "iss": "edge",
        "aud": running.get("/kinroute/v1/state")["instance_id"],
        "issued_s": now_s,
        "expires_s": now_s + LIFE_S,
        "jti": secrets.token_hex(8),
        "request_id": request_id,
        "request_type": "context_and_generation",
        "model": MODEL_NAME,
        "turn": "t",
        "family": "parent",
        "conversation": conversation,
        "parent": "parent",
        "prompt_sha256": prompt_sha256(np.array(PROMPT, "<u4").tobytes()),
    }
    return Claims(**(claims | changes))


def unsigned(claims: Claims) -> str:
    return f"{_part({'alg': 'none', 'kid': KEY.key_id})}.{_payload(claims)}."


def signed_with_the_public_key(claims: Claims) -> str:
    body = f"{_part({'alg': 'HS256', 'kid': 'public'})}.{_payload(claims)}"
    return f"{body}.{_base64(hmac.digest(PEM, body.encode(), hashlib.sha256))}"


def _payload(claims: Claims) -> str:
    return Signer(KEY).sign(claims).split(".")[1]


def _part(value: object) -> str:
    return _base64(json.dumps(value).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def new_name() -> str:
    return secrets.token_hex(6)


def parents(running: Running) -> dict[str, str | None]:
    """Of every conversation that the worker knows."""
    known = running.get("/kinroute/v1/families?limit=1000")["conversations"]
    return {one["conversation"]: one["parent"] for one in known}


def test_a_proven_parent_is_the_conversations_parent(running: Running, ask: Ask) -> None:
    child, request_id = new_name(), new_name()

    assert ask(Signer(KEY).sign(claims_for(running, child, request_id)), child, request_id) == Told()
    assert parents(running)[child] == "parent"


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": "another-worker"},
        {"issued_s": 1, "expires_s": 61},
        {"issued_s": int(time.time()), "expires_s": int(time.time()) + 3600},
        {"request_id": "another"},
        {"request_type": "context_only"},
        {"model": "another"},
        {"conversation": "another"},
        {"prompt_sha256": prompt_sha256(b"another")},
        {"purpose": PURPOSE_LINK},
        {"purpose": PURPOSE_RETURN},
        {"jti": ""},
    ],
    ids=lambda changes: "-".join(changes) + str(changes.get("purpose", "")),
)
def test_an_envelope_for_something_else_is_refused_and_leaves_no_trace(
    running: Running, ask: Ask, changes: dict[str, Any]
) -> None:
    child, request_id = new_name(), new_name()
    before = parents(running)

    told = ask(Signer(KEY).sign(claims_for(running, child, request_id, **changes)), child, request_id)

    assert told == Told("INVALID_ARGUMENT", is_lineage=True)
    assert parents(running) == before


@pytest.mark.parametrize(
    "sign",
    [
        unsigned,
        signed_with_the_public_key,
        Signer(RETIRED).sign,
        Signer(UNKNOWN).sign,
        Signer(Key(KEY.key_id, UNKNOWN.secret)).sign,
        lambda claims: Signer(KEY).sign(claims)[:-1],
        lambda claims: "forged",
    ],
    ids=["none", "public-key", "retired", "unknown", "another-secret", "cut", "no-jwt"],
)
def test_an_envelope_that_no_key_of_ours_signed_is_refused(
    running: Running, ask: Ask, sign: Callable[[Claims], str]
) -> None:
    child, request_id = new_name(), new_name()

    told = ask(sign(claims_for(running, child, request_id)), child, request_id)

    assert told == Told("INVALID_ARGUMENT", is_lineage=True)
    assert child not in parents(running)


def test_an_envelope_counts_once_whoever_brings_it_again(running: Running, ask: Ask) -> None:
    child, request_id = new_name(), new_name()
    envelope = Signer(KEY).sign(claims_for(running, child, request_id))
    assert ask(envelope, child, request_id) == Told()

    # The same request on a new connection, as after an edge has started again, and a statement by another edge.
    assert ask(envelope, child, request_id).is_lineage
    assert over_link(running.grpc, envelope, child, request_id, PROMPT).is_lineage
    assert over_openengine(running.grpc, envelope, child, request_id, PROMPT).is_lineage


def test_what_the_worker_refuses_as_lineage_it_serves_without(running: Running, ask: Ask) -> None:
    child, request_id = new_name(), new_name()
    assert ask("forged", child, request_id).is_lineage

    assert ask("", child, request_id) == Told()


def hinted(running: Running, child: str, *, request_type: str = "context_only", **changes: Any) -> Told:
    """A request with a hint in TensorRT-LLM's dialect. `changes`: what was signed instead; `pairs`: sent instead."""
    request_id = new_name()
    pairs = changes.pop("pairs", None)
    hint = GrpcHint(**({"model": MODEL_NAME, "conversation": child, "parent": "p", "request_id": request_id} | changes))
    metadata = hint.metadata(AFFINITY_KEY) if pairs is None else pairs(hint)
    extra = {"request_type": request_type, "conversation_id": child}
    return generated(running.grpc, generate_request(PROMPT, 1, request_id=request_id, extra=extra), metadata)


def test_the_other_dialect_is_advertised_where_its_key_is_and_names_a_parent_among_peers(running: Running) -> None:
    child = new_name()

    assert hinted(running, child) == Told()

    assert parents(running)[f"peer:{child}"] == "peer:p"
    assert child not in parents(running), "what a peer names is no conversation of an edge"
    with OpenEngine(running.grpc) as client:
        extra = client.control.GetServerInfo(server_pb2.GetServerInfoRequest()).extra.fields
    assert extra[CAPABILITY].bool_value
    assert extra["kinroute_lineage"].bool_value


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "another"},
        {"model": "another"},
        {"conversation": "another"},
        {"request_type": "context_and_generation"},
        {"request_type": "generation_only"},
        {"pairs": lambda hint: hint.metadata(b"another key")},
        {"pairs": lambda hint: hint.metadata(AFFINITY_KEY)[:1]},
        {"pairs": lambda hint: hint.metadata(AFFINITY_KEY)[1:]},
        {"pairs": lambda hint: (*hint.metadata(AFFINITY_KEY), (ID_KEY, "p"))},
        {"pairs": lambda hint: (*hint.metadata(AFFINITY_KEY), (AUTH_KEY, hint.sign(AFFINITY_KEY)))},
        {"pairs": lambda hint: (*hint.metadata(AFFINITY_KEY), ("kinroute-lineage", "a.b.c"))},
        {"pairs": lambda hint: ((ID_KEY, " p"), (AUTH_KEY, hint.sign(AFFINITY_KEY)))},
    ],
    ids=[
        *("request-id", "model", "conversation", "aggregated", "generation", "key", "no-auth", "no-id"),
        *("two-ids", "two-auths", "and-an-envelope", "untrimmed"),
    ],
)
def test_a_hint_in_the_other_dialect_that_does_not_hold_is_refused(running: Running, changes: dict[str, Any]) -> None:
    child = new_name()
    before = parents(running)

    told = hinted(running, child, **changes)

    assert told.code == "INVALID_ARGUMENT"
    assert told.is_lineage or changes.get("request_type") == "generation_only"
    assert parents(running) == before


def test_a_hint_without_a_conversation_is_refused(running: Running) -> None:
    signed = hmac.digest(AFFINITY_KEY, b"whatever", "sha256").hex()

    assert hinted(running, "", pairs=lambda hint: ((ID_KEY, "p"), (AUTH_KEY, f"sha256={signed}"))).is_lineage


def test_a_peer_cannot_name_a_conversation_of_an_edge_as_its_parent_or_speak_as_it(running: Running) -> None:
    ours, request_id = new_name(), new_name()
    envelope = Signer(KEY).sign(claims_for(running, ours, request_id))
    assert over_openengine(running.grpc, envelope, ours, request_id, PROMPT) == Told()

    assert hinted(running, ours, parent="stranger") == Told()

    assert parents(running)[ours] == "parent"
    assert parents(running)[f"peer:{ours}"] == "peer:stranger"
