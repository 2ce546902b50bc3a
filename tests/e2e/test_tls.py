"""Edge and workers off loopback, all over mutual TLS: callers are served, pages travel, others are kept out."""

from __future__ import annotations

import dataclasses
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from bench.certificates import Authority
from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2, service_pb2_grpc
from tests.e2e.system import Part, System
from tests.tiny_models import make_tiny_model
from tests.worker.clients import generate_request, session_of, status_of, token_ids
from worker.core.handoff import SessionRef
from worker.keys import WorkerKeys
from worker.session_proofs import SessionProofs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PROMPT = list(range(10, 73))
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Secured:
    authority: Authority
    system: System
    edge: Part
    context: Part
    generation: Part

    def url(self) -> str:
        return dialled(self.edge.http).replace("http:", "https:")

    def channel(self, part: Part, *, certified: bool = True) -> grpc.Channel:
        own = [Path(file).read_bytes() for file in self.authority.issue("test").pair] if certified else [None, None]
        trusted = Path(self.authority.file).read_bytes()
        return grpc.secure_channel(dialled(part.grpc), grpc.ssl_channel_credentials(trusted, own[1], own[0]))


def dialled(address: str) -> str:
    return address.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - where the test's listeners are


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "authority")
    mutual = {"client_ca_file": authority.file}
    everywhere = "0.0.0.0:0"
    worker: dict[str, Any] = {
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 4096},
        "listen": {
            "grpc": everywhere,
            "admin": {"address": everywhere, "allow_plaintext": True},
            "tls": {**authority.issue("worker").files, **mutual},
        },
    }
    with System(folder, make_tiny_model(folder / "model")) as system:
        context = system.start_worker("context", role="context", **worker)
        generation = system.start_worker("generation", role="generation", **worker)
        for part in (context, generation):
            part.members["grpc"] = dialled(part.grpc)
        edge = system.start_edge(
            "edge",
            [context],
            [generation],
            worker_tls={"ca_file": authority.file, **authority.issue("edge").files},
            listen={
                "http": everywhere,
                "admin": "127.0.0.1:0",
                "tls": authority.issue("front").files,
            },
        )
        system.wait_ready(context, generation, edge)
        yield Secured(authority, system, edge, context, generation)


def test_a_caller_is_served_through_edge_and_workers(secured: Secured) -> None:
    trusted = ssl.create_default_context(cafile=secured.authority.file)
    with httpx.Client(verify=trusted, headers={"x-api-key": secured.system.key}, timeout=DEADLINE_S) as client:
        asked = {"model": "tiny", "prompt": "a b c", "max_tokens": 8, "temperature": 0}
        answer = client.post(f"{secured.url()}/v1/completions", json=asked)

    assert answer.status_code == 200, answer.text
    receipt = answer.headers["x-kinroute-receipt"]
    assert secured.context.grpc in receipt
    assert secured.generation.grpc in receipt


def test_pages_that_travel_over_tls_continue_token_for_token(secured: Secured) -> None:
    with secured.channel(secured.context) as to_context, secured.channel(secured.generation) as to_generation:
        context = service_pb2_grpc.InferenceStub(to_context)
        generation = service_pb2_grpc.InferenceStub(to_generation)

        def answer(stub: service_pb2_grpc.InferenceStub, **fields: Any) -> list[generation_pb2.GenerateResponse]:
            return list(stub.Generate(generate_request(PROMPT, 8, **fields), timeout=DEADLINE_S))

        ready = answer(context, extra={"request_type": "context_only"})
        # As if they were on two hosts.
        given = dataclasses.replace(SessionRef.read(session_of(ready)), host_key="", proof="")
        fleets = SessionProofs(WorkerKeys(secured.system.keyring.path.with_name("worker-keys.json")), life_s=60.0)
        session = kv_pb2.KvSessionRef.FromString(fleets.proven(given, time.time()).encode())
        moved = answer(generation, kv=generation_pb2.KvOptions(session=session))
        alone = answer(generation, kv=generation_pb2.KvOptions(bypass_prefix_cache=True))

    assert token_ids(moved) == token_ids(alone)
    assert len(token_ids(alone)) == 8


def test_who_shows_no_certificate_opens_no_link_and_aborts_nothing(secured: Secured) -> None:
    hello = link_pb2.EdgeMessage(hello=link_pb2.Hello(revision=1, edge_id="eve"))
    everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    for channel in (
        secured.channel(secured.context, certified=False),
        grpc.insecure_channel(secured.context.grpc),
    ):
        with channel:
            with pytest.raises(grpc.RpcError) as unlinked:
                next(link_pb2_grpc.EngineLinkStub(channel).Connect(iter([hello]), timeout=DEADLINE_S))
            with pytest.raises(grpc.RpcError) as unheard:
                service_pb2_grpc.ControlStub(channel).Abort(everything, timeout=DEADLINE_S)
            assert status_of(unlinked)[0] is status_of(unheard)[0] is grpc.StatusCode.UNAVAILABLE
    with secured.channel(secured.context) as channel:
        first = next(link_pb2_grpc.EngineLinkStub(channel).Connect(iter([hello]), timeout=DEADLINE_S))
        assert first.HasField("welcome"), "a certificate is proof enough, without an envelope"


def test_a_worker_says_at_the_start_what_is_open_and_serves_no_control_calls_there(secured: Secured) -> None:
    admin = dialled(secured.context.admin)

    assert httpx.get(f"{admin}/ready", timeout=DEADLINE_S).status_code == 200
    assert httpx.get(f"{admin}/kinroute/v1/leaks", timeout=DEADLINE_S).status_code == 403
    assert "listen.admin is" in secured.context.child.last_lines(1000)
