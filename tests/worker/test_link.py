"""EngineLink as an edge sees it: one Step per engine step, and requests that end with their link."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from edge.signing import EnvelopeSigner
from enginelink.envelope import Key
from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, generation_pb2, lifecycle_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import Edge, OpenEngine, generate_request, kinds, link_tokens, token_ids
from tests.worker.running import MODEL_NAME, Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROMPT = list(range(40, 60))
LONG = 1000
KEYS = (Key("k", b"1" * 32),)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    with worker(folder, make_tiny_model(folder / "model"), tensor_parallel_size=2) as started:
        started.wait_for("ready")
        yield started


@pytest.fixture
def edge(running: Running) -> Iterator[Edge]:
    with Edge(running.grpc) as linked:
        yield linked
    running.wait_clean()


def test_the_first_message_welcomes_with_what_is_served(edge: Edge) -> None:
    assert edge.welcome.model.served_model_name == MODEL_NAME
    assert edge.welcome.server.parallelism.tensor_parallel_size == 2
    assert edge.welcome.load.total_pages == 1024


def test_a_whole_answer_is_started_tokens_and_an_end_with_usage(edge: Edge, running: Running) -> None:
    handle = edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, 5)

    events = edge.events(handle)

    assert kinds(events) == ["started", *["token"] * 5, "finished"]
    assert events[-1].finished.usage.completion_tokens == 5
    assert events[-1].finished.reason == generation_pb2.FINISH_REASON_LENGTH
    with OpenEngine(running.grpc) as client:
        assert token_ids(client.answer(generate_request(PROMPT, 5))) == link_tokens(events)


def test_steps_carry_all_requests_of_the_edge_together(edge: Edge) -> None:
    handles = {edge.submit([*PROMPT, extra], link_pb2.PHASE_AGGREGATED, 20) for extra in range(4)}

    together, ended = 0, 0
    for step in edge.steps():
        together = max(together, len(step.handles) // 4)
        ended += sum(event.HasField("finished") for event in step.events)
        if ended == len(handles):
            break

    assert together == len(handles)


def test_log_probabilities_make_a_token_an_event(edge: Edge) -> None:
    candidates = generation_pb2.CandidateTokenSelection(top_n=2)
    response = generation_pb2.ResponseOptions(output_candidates=candidates)
    handle = edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, 2, response=response)

    events = edge.events(handle)

    assert [len(event.token.candidates) for event in events if event.HasField("token")] == [2, 2]


def test_a_refusal_is_a_terminal_event_of_its_handle(edge: Edge) -> None:
    handle = edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, model="other")

    events = edge.events(handle)

    assert kinds(events) == ["error"]
    assert events[0].error.code == error_pb2.ERROR_CODE_MODEL_NOT_FOUND


def test_an_envelope_that_does_not_prove_its_request_is_refused(edge: Edge) -> None:
    handle = edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, lineage="a.b.c", conversation_id="child")

    assert edge.events(handle)[-1].error.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT


def test_a_cancelled_request_is_heard_of_no_more(edge: Edge, running: Running) -> None:
    handle = edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, LONG)
    edge.events(handle, last=["token"])

    edge.cancel(handle)
    other = edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, 2)

    assert kinds(edge.events(other))[-1] == "finished"
    running.wait_clean()


def test_a_lost_link_ends_its_requests_and_no_others(running: Running) -> None:
    with Edge(running.grpc) as survivor:
        kept = survivor.submit([1, *PROMPT], link_pb2.PHASE_AGGREGATED, 200)
        with Edge(running.grpc) as lost:
            for extra in range(3):
                lost.submit([*PROMPT, extra], link_pb2.PHASE_AGGREGATED, LONG)

        events = survivor.events(kept)

    assert len(link_tokens(events)) == 200
    running.wait_clean()


def test_a_handle_in_use_ends_the_link(running: Running) -> None:
    with Edge(running.grpc) as edge:
        handle = edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, LONG)
        edge.submit(PROMPT, link_pb2.PHASE_AGGREGATED, handle=handle)

        with pytest.raises(grpc.RpcError, match=r"submit\.handle is 1, which is in use"):
            edge.events(handle)
    running.wait_clean()


def test_a_worker_that_others_can_reach_accepts_no_link_and_no_abort_without_an_envelope(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = base64.b64encode(KEYS[0].secret).decode()
    keys.write_text(json.dumps({"envelope_keys": [{"id": KEYS[0].key_id, "secret": secret}]}))
    listen = {"grpc": "0.0.0.0:0", "admin": "127.0.0.1:0", "allow_plaintext": True}
    with worker(tmp_path, make_tiny_model(tmp_path / "model"), listen=listen, keys_file=str(keys)) as running:
        running.wait_for("ready")
        address = running.grpc.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - the wildcard, as configured

        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"), Edge(address):
            pass

        instance_id = running.get("/kinroute/v1/state")["instance_id"]
        with OpenEngine(address) as client, Edge(address, envelope=EnvelopeSigner("e", KEYS).link(instance_id)):
            signed = (("kinroute-lineage", EnvelopeSigner("e", KEYS).link(instance_id)),)
            everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                client.control.Abort(everything)
            aborted = client.control.Abort(everything, metadata=signed)
            assert aborted.status == lifecycle_pb2.ABORT_STATUS_ABORTED
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                client.control.Abort(everything, metadata=signed)
