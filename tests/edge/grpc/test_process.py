"""The gRPC listener of an edge that runs as a process: told of, drained, and refused where its address is taken."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.keyring import Keyring
from openengine.v1 import generation_pb2
from tests.edge.grpc.harness import DEADLINE_S, Client, events_of, ids_of, request
from tests.edge.test_app import configure, heard, running

TOKENS = 60
LISTEN = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0", "grpc": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[str, str]]:
    with (
        running("bench.fake_worker", "--step-ms", "5") as context,
        running("bench.fake_worker", "--step-ms", "5") as generation,
    ):
        yield heard(context)["grpc"], heard(generation)["grpc"]


@pytest.fixture
def edge(tmp_path: Path, workers: tuple[str, str]) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    file = configure(tmp_path, [workers[0]], [workers[1]], listen=LISTEN, drain_timeout_s=600)
    with running("kinroute", "edge", "--config", str(file)) as process:
        address = heard(process)["grpc"]
        with Client(address, Keyring.load(tmp_path / "keys.json").local_key) as client:
            assert heard(process) == {"event": "ready"}
            yield process, client


def test_a_turn_is_handed_from_worker_to_worker_as_its_legs_are(
    edge: tuple[subprocess.Popen[str], Client],
) -> None:
    _, client = edge
    whole = client.answer(request("Hi", 8))

    (ready,) = client.answer(request("Hi", 8, extra={"request_type": "context_only"}))
    session = ready.prefill_ready.kv_session
    leg = client.answer(request("Hi", 8, kv=generation_pb2.KvOptions(session=session)))

    assert len(ids_of(whole)) == 8
    # The fake worker's first token depends on the request's id.
    assert ids_of(leg)[1:] == ids_of(whole)[1:]
    assert events_of(leg)[-1] == "finished"


def test_a_running_answer_is_finished_before_the_edge_ends(edge: tuple[subprocess.Popen[str], Client]) -> None:
    process, client = edge
    call = client.generate(request("Hi", TOKENS))
    responses = [next(call)]

    process.send_signal(signal.SIGTERM)
    responses += call

    assert events_of(responses)[-1] == "finished"
    assert len(ids_of(responses)) == TOKENS
    assert process.wait(DEADLINE_S) == 0


def test_once_told_to_stop_it_serves_no_more(edge: tuple[subprocess.Popen[str], Client]) -> None:
    process, client = edge
    states = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    while next(states).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    call = client.generate(request("Hi", TOKENS))
    next(call)

    process.send_signal(signal.SIGTERM)

    assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert client.refused(request())[0] == grpc.StatusCode.UNAVAILABLE
    assert len(list(call)) > 1
    # Who watches, for ever, keeps it from ending no longer than who waits for an answer.
    assert process.wait(DEADLINE_S) == 0


def test_an_address_that_is_taken_is_one_sentence(tmp_path: Path, workers: tuple[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        file = configure(tmp_path, [workers[0]], [workers[1]], listen=LISTEN | {"grpc": address})
        ended = subprocess.run(
            [sys.executable, "-m", "kinroute", "edge", "--config", str(file)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    assert ended.returncode == 78
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"listen.grpc is {json.dumps(address)[1:-1]!r}: cannot listen there")
