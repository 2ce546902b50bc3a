"""Callers that mean harm or are broken, over real sockets: each is refused, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from edge.core.admission import AdmissionLimits
from edge.core.types import TenantLimits
from edge.settings import Limits
from tests.edge.http.harness import KEY, MODEL, Script, Served, served

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
LIMITS = Limits(
    header_bytes=8_192,
    header_timeout_s=0.5,
    body_bytes=100_000,
    body_timeout_s=0.5,
    body_bytes_per_s=1_000_000,
    stalled_client_timeout_s=0.5,
    client_buffer_chars=200_000,
    keep_alive_timeout_s=5.0,
)
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def strict_edge(text_folder: Path) -> Iterator[Served]:
    with served(text_folder, limits=LIMITS) as running:
        yield running


@pytest.fixture
def edge(strict_edge: Served) -> Iterator[Served]:
    strict_edge.worker.answer = lambda order: Script()
    yield strict_edge
    with strict_edge.client() as client:
        assert client.post(CHAT, json=BODY).status_code == 200, "others are served"
    assert strict_edge.settled_leaks() == {"requests": 0, "turns": 0, "legs": 0}


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes; a reset counts as that."""
    connection.settimeout(10.0)
    data = b""
    try:
        while chunk := connection.recv(65_536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def drip(connection: socket.socket, data: bytes, every_s: float = 0.05) -> None:
    """Send a byte at a time until the server hangs up."""
    for at in range(len(data)):
        try:
            connection.sendall(data[at : at + 1])
        except OSError:
            return
        time.sleep(every_s)


def test_headers_sent_a_byte_at_a_time_are_cut_off(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        drip(connection, HEAD[:60])
        reply = read_all(connection)

    assert reply.startswith(b"HTTP/1.1 408 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_a_connection_that_says_nothing_is_closed(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        assert read_all(connection) == b""


def test_a_body_sent_a_byte_at_a_time_is_cut_off(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        connection.sendall(HEAD + b"content-length: 500\r\n\r\n")
        drip(connection, b"{" * 60)
        reply = read_all(connection)

    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"came too slowly" in reply


def test_a_second_request_of_a_connection_has_the_same_deadlines(edge: Served) -> None:
    raw = json.dumps(BODY).encode()
    with socket.create_connection(edge.address) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.7)
        drip(connection, HEAD[:60])
        reply = read_all(connection)

    assert b"HTTP/1.1 408 " in reply, "waiting between requests is allowed, dripping is not"


@pytest.mark.parametrize("cut", [20, len(HEAD) + 30], ids=["in its headers", "in its body"])
def test_a_request_behind_another_waits_for_its_answer_without_being_cut_off(edge: Served, cut: int) -> None:
    edge.worker.answer = lambda order: Script("x" * 200, step_s=0.005)
    raw = json.dumps(BODY).encode()
    with socket.create_connection(edge.address) as connection:
        request = HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw
        connection.sendall(request + request[:cut])
        time.sleep(0.8)
        connection.sendall(request[cut:])
        connection.settimeout(10.0)
        replies = b""
        while replies.count(b"chat.completion") < 2:
            chunk = connection.recv(65_536)
            assert chunk, replies
            replies += chunk

    assert replies.count(b"HTTP/1.1 200 ") == 2
    assert b"HTTP/1.1 408 " not in replies


def test_what_begins_no_request_does_not_keep_a_connection(edge: Served) -> None:
    raw = json.dumps(BODY).encode()
    with socket.create_connection(edge.address) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        connection.recv(65_536)
        connection.sendall(b"\r\n")
        began_s = time.monotonic()
        read_all(connection)

    assert time.monotonic() - began_s < LIMITS.keep_alive_timeout_s


def test_a_body_that_nobody_wants_is_not_read_forever(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100_000_000:
                connection.sendall(b" " * 100_000)
                sent += 100_000

    assert sent < 50_000_000


def test_connections_over_the_limit_are_closed(text_folder: Path) -> None:
    with served(text_folder, limits=Limits(connections=2)) as edge:
        connections = [socket.create_connection(edge.address) for _ in range(3)]
        assert read_all(connections[2]) == b""
        for connection in connections:
            connection.close()


def test_headers_without_end_are_cut_off(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        connection.sendall(HEAD + b"x-long: " + b"a" * 10_000)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_what_is_no_http_is_refused_in_openais_shape(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        reply = read_all(connection)

    assert reply.startswith(b"HTTP/1.1 400 ")
    assert "error" in json.loads(reply.partition(b"\r\n\r\n")[2])


def test_an_announced_body_over_the_limit_is_refused_before_it_is_sent(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        connection.sendall(HEAD + b"content-length: 99999999999\r\n\r\n")
        connection.settimeout(5.0)
        reply = connection.recv(65_536)

    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in reply


def test_a_body_over_the_limit_is_refused_while_it_comes(edge: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(500):
            yield b" " * 1_000

    with edge.client() as client:
        response = client.post(CHAT, content=endless(), headers={"content-type": "application/json"})

    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_large_body_within_the_limit_is_read(edge: Served) -> None:
    with edge.client() as client:
        response = client.post(CHAT, json={**BODY, "user": "u" * 90_000})

    assert response.status_code == 200


def test_a_caller_without_a_key_cannot_make_the_edge_wait_for_its_body(edge: Served) -> None:
    with socket.create_connection(edge.address) as connection:
        connection.sendall(HEAD.replace(KEY.encode(), b"wrong") + b"content-length: 90000\r\n\r\n")
        connection.settimeout(0.4)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"a":' * 200 + b"1" + b"}" * 200,
    ],
    ids=["10,000 arrays", "500 arrays", "200 objects"],
)
def test_deep_json_is_refused(edge: Served, body: bytes) -> None:
    with edge.client() as client:
        response = client.post(CHAT, content=body, headers={"content-type": "application/json"})

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_json_of_ordinary_depth_is_read(edge: Served) -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(20):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with edge.client() as client:
        # The prompt is longer than the context, which is what is found wrong with it.
        response = client.post(CHAT, json={**BODY, "tools": tools * 30})

    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_hundred_thousand_messages_are_refused(text_folder: Path) -> None:
    messages = [{"role": "user", "content": ""}] * 100_000
    with served(text_folder) as edge, edge.client() as client:
        response = client.post(CHAT, json={**BODY, "messages": messages})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_caller_that_hangs_up_ends_its_answer_at_once(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("x" * 400, step_s=0.05)
    edge.worker.cancelled.clear()
    with edge.client() as client, client.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        assert next(response.iter_lines()).startswith("data: ")
    edge.worker.answer = lambda order: Script()

    assert edge.settled_leaks()["turns"] == 0
    assert len(edge.worker.cancelled) == 1
    statuses = [record["status"] for record in edge.admin("/kinroute/v1/requests").json()["requests"]]
    assert 499 in statuses


def test_a_caller_that_hangs_up_before_the_first_token_ends_its_turn(edge: Served) -> None:
    hold = threading.Event()
    edge.worker.answer = lambda order: Script(hold=hold)
    edge.worker.cancelled.clear()
    raw = json.dumps(BODY).encode()
    with socket.create_connection(edge.address) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        time.sleep(0.1)
    edge.worker.answer = lambda order: Script()

    assert edge.settled_leaks()["turns"] == 0
    assert len(edge.worker.cancelled) == 1


# Log probabilities make a stream large: about 2 kB a token, more than sockets buffer.
LARGE = {**BODY, "n": 16, "stream": True, "logprobs": True, "top_logprobs": 20}


def ask_and_never_read(edge: Served) -> socket.socket:
    """Ask for a large stream; returns once its turns are over, though nothing was read."""
    raw = json.dumps(LARGE).encode()
    seen = len(edge.worker.orders)
    edge.worker.answer = lambda order: Script("x" * 400, step_s=0.0005)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.connect(edge.address)
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw)
    deadline_s = time.monotonic() + 20.0
    while len(edge.worker.orders) == seen or edge.driver.running:
        assert time.monotonic() < deadline_s, "the answer of a caller that does not read goes on"
        time.sleep(0.02)
    edge.worker.answer = lambda order: Script()
    return connection


def test_a_caller_that_reads_nothing_is_cut_off(edge: Served) -> None:
    with ask_and_never_read(edge) as connection:
        assert edge.settled_leaks()["requests"] == 0
        assert b"[DONE]" not in read_all(connection)


def test_a_caller_that_reads_too_slowly_is_cut_off_when_its_buffer_is_full(text_folder: Path) -> None:
    limits = Limits(client_buffer_chars=1_000, stalled_client_timeout_s=30.0)
    with served(text_folder, limits=limits) as edge, ask_and_never_read(edge) as connection:
        assert edge.settled_leaks()["requests"] == 0
        assert len(edge.worker.cancelled) == LARGE["n"]
        assert "kinroute_edge_slow_clients_total 1.0" in edge.admin("/metrics").text
        assert b"[DONE]" not in read_all(connection)


def test_limits_of_one_tenant_leave_others_alone(text_folder: Path) -> None:
    hold = threading.Event()
    with served(text_folder, admission=AdmissionLimits(tenant=TenantLimits(requests=2))) as edge:
        edge.worker.answer = lambda order: Script(hold=hold) if order.tenant == "acme" else Script()
        raw = json.dumps(BODY).encode()
        connections = [socket.create_connection(edge.address) for _ in range(2)]
        try:
            for connection in connections:
                connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw)
            while len(edge.worker.orders) < 2:
                time.sleep(0.01)
            with edge.client() as ann, edge.client("kr-other") as bob:
                assert ann.post(CHAT, json=BODY).status_code == 429
                assert bob.post(CHAT, json=BODY).status_code == 200
        finally:
            for connection in connections:
                connection.close()
        assert edge.settled_leaks()["requests"] == 0


def test_internal_headers_from_outside_are_dropped(edge: Served) -> None:
    headers = {"X-TRTLLM-Subagent-Affinity-Id": "p", "Kinroute_Lineage": "forged", "OpenEngine-Priority": "9"}
    with httpx.Client(base_url=edge.url) as client:
        response = client.post(CHAT, json=BODY, headers={"authorization": f"Bearer {KEY}", **headers})

    assert response.status_code == 200
    assert edge.worker.orders[-1].lineage.parent is None
