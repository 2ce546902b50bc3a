"""A generation worker with keys dials nobody but who a worker of its fleet names."""

from __future__ import annotations

import base64
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from enginelink.envelope import LEEWAY_S, Key
from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, generation_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request, status_of
from tests.worker.running import Running, worker
from worker.core.handoff import KvShape, KvSource, SessionRef
from worker.core.networks import AllowedNetworks
from worker.core.outputs import HandoffReady
from worker.core.types import Request, RequestKey
from worker.handoffs import Handoffs
from worker.intake import Intake, Served
from worker.keys import WorkerKeys
from worker.lineage import Envelopes
from worker.refusal import Refused
from worker.session_keys import SessionKeys
from worker.session_proofs import SessionProofs

KEY, OTHER = Key("edge.one", b"1" * 32), Key("edge.one", b"2" * 32)
NOW_S = 1_000_000.0
REF = SessionRef(
    session_id="0" * 32,
    secret="f" * 64,
    instance_id="i",
    host_key="",
    request_id=1,
    first_token=5,
    prompt_tokens=20,
    cached_prompt_tokens=0,
    shape=KvShape(num_layers=2, num_kv_heads=2, head_dim=16, tokens_per_block=4, dtype="float32"),
    sources=(KvSource("127.0.0.1", 9, 0, 2),),
)


def write_keys(file: Path, *keys: Key, **members: Any) -> Path:
    entries = [{"id": key.key_id, "secret": base64.b64encode(key.secret).decode(), **members} for key in keys]
    file.write_text(json.dumps({"envelope_keys": entries}))
    return file


@pytest.fixture
def proofs(tmp_path: Path) -> SessionProofs:
    return SessionProofs(WorkerKeys(write_keys(tmp_path / "keys", KEY)), 60.0)


def refused(proofs: SessionProofs, ref: SessionRef, now_s: float = NOW_S) -> int:
    with pytest.raises(Refused, match=r"kv\.session") as caught:
        proofs.require(ref, now_s)
    return caught.value.code


def test_a_reference_that_a_worker_of_the_fleet_made_is_good_also_after_it_was_carried(proofs: SessionProofs) -> None:
    ref = SessionRef.parse(proofs.proven(REF, NOW_S).encode())

    proofs.require(ref, NOW_S + 59)


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": (KvSource("127.0.0.1", 10, 0, 2),)},
        {"sources": (KvSource("10.0.0.1", 9, 0, 2),)},
        {"secret": "e" * 64},
        {"session_id": "1" * 32},
        {"first_token": 6},
        {"host_key": "h"},
        {"proof": ""},
        {"proof": "a.b"},
        {"proof": "edge.one.99999999999.00"},
        {"proof": "edge.one.x.é"},
    ],
    ids=str,
)
def test_one_that_was_altered_or_has_no_proof_is_refused(proofs: SessionProofs, changes: dict[str, Any]) -> None:
    ref = dataclasses.replace(proofs.proven(REF, NOW_S), **changes)

    assert refused(proofs, ref) == error_pb2.ERROR_CODE_INVALID_ARGUMENT


def test_a_longer_life_than_was_signed_is_an_alteration(proofs: SessionProofs) -> None:
    ref = proofs.proven(REF, NOW_S)
    longer = dataclasses.replace(ref, proof=ref.proof.replace(".1000060.", ".2000060."))

    assert refused(proofs, longer) == error_pb2.ERROR_CODE_INVALID_ARGUMENT


def test_one_that_has_expired_is_not_found(proofs: SessionProofs) -> None:
    code = refused(proofs, proofs.proven(REF, NOW_S), NOW_S + 60 + LEEWAY_S)

    assert code == error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND


def test_another_fleets_key_and_a_retired_one_prove_nothing(proofs: SessionProofs, tmp_path: Path) -> None:
    others = SessionProofs(WorkerKeys(write_keys(tmp_path / "others", OTHER)), 60.0)
    retired = SessionProofs(WorkerKeys(write_keys(tmp_path / "retired", KEY, retire_at=NOW_S)), 60.0)

    assert refused(proofs, others.proven(REF, NOW_S)) == error_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert refused(retired, proofs.proven(REF, NOW_S)) == error_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert retired.proven(REF, NOW_S) == REF


def test_without_keys_nothing_is_proven_and_nothing_asked_for() -> None:
    proofs = SessionProofs(WorkerKeys(None), 60.0)

    assert proofs.proven(REF, NOW_S) == REF
    proofs.require(REF, NOW_S)


def test_what_a_context_worker_hands_out_a_generation_worker_with_the_same_keys_takes(tmp_path: Path) -> None:
    keys = WorkerKeys(write_keys(tmp_path / "keys", KEY))
    proofs = SessionProofs(keys, 60.0)
    served = Served("tiny", "generation", 259, 512, frozenset({2}), REF.shape, AllowedNetworks())
    intake = Intake(served, Envelopes(keys, "i", required=True), proofs=proofs)
    sessions = SessionKeys(b"token", b"nonce")
    handoffs = Handoffs(sessions, shape=REF.shape, sources=REF.sources, host_key="", instance_id="another")
    ready = HandoffReady(RequestKey(1), first_token=5, logprobs=None, prompt_tokens=20, cached_tokens=0)

    def asked(session: bytes) -> Request:
        token_ids = np.arange(40, 60, dtype="<i4").tobytes()
        submit = link_pb2.Submit(
            handle=1, request_id="r", model="tiny", phase=link_pb2.PHASE_GENERATION, token_ids=token_ids
        )
        submit.kv_session = session
        return intake.from_submit(RequestKey(2), submit)

    assert asked(handoffs.begin(ready, lambda ref: proofs.proven(ref, time.time()))).first_token == 5
    with pytest.raises(Refused, match="does not prove"):
        asked(handoffs.begin(ready, lambda ref: ref))


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    keys = str(write_keys(folder / "keys.json", KEY))
    with worker(folder, make_tiny_model(folder / "model"), role="generation", keys_file=keys) as started:
        started.wait_for("ready")
        yield started


@pytest.mark.slow
def test_a_host_of_the_callers_own_is_dialled_only_where_a_worker_of_the_fleet_named_it(
    generation: Running, tmp_path: Path
) -> None:
    proofs = SessionProofs(WorkerKeys(write_keys(tmp_path / "keys", KEY)), 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, OpenEngine(generation.grpc) as client:
        listener.settimeout(0.3)
        ref = dataclasses.replace(REF, sources=(KvSource("127.0.0.1", listener.getsockname()[1], 0, 2),))

        def ask(ref: SessionRef) -> Any:
            kv = generation_pb2.KvOptions(session=ref.to_message())
            return client.generate(generate_request(list(range(40, 60)), 4, kv=kv))

        for forged, code in (
            (ref, grpc.StatusCode.INVALID_ARGUMENT),
            (proofs.proven(ref, time.time() - 120), grpc.StatusCode.NOT_FOUND),
            (dataclasses.replace(proofs.proven(ref, time.time()), secret="0" * 64), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(ask(forged))
            assert status_of(caught)[0] == code
            with pytest.raises(TimeoutError):
                listener.accept()

        named = ask(proofs.proven(ref, time.time()))
        listener.settimeout(10.0)
        listener.accept()[0].close()
        assert list(named)[-1].error.code == error_pb2.ERROR_CODE_KV_TRANSFER_FAILED
    generation.wait_clean()
