"""What would exhaust an edge, with a key, over HTTP and gRPC: refused, while another tenant streams beside it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from openengine.v1 import generation_pb2, service_pb2_grpc
from tests.attacks import http2
from tests.attacks.beside import Beside
from tests.attacks.callers import BOB, EVE, Caller
from tests.attacks.doors import BODY, CHAT, WAIT_S, Doors
from tests.attacks.grpc_dice import right_request

MIB = 1 << 20
GENERATE = "/openengine.v1.Inference/Generate"
JSON = {"content-type": "application/json"}
BOMB = b'{"messages": "' + b" " * (64 * MIB) + b'"}'


@pytest.fixture
def attacked(doors: Doors) -> Iterator[Doors]:
    with Beside(doors):
        yield doors


def post(doors: Doors, body: bytes, headers: dict[str, str] | None = None, times: int = 3) -> set[int]:
    """The statuses of the same request, sent several times at once."""
    statuses: list[int] = []

    def once() -> None:
        with doors.client(EVE) as client:
            statuses.append(client.post(CHAT, content=body, headers=JSON | (headers or {})).status_code)

    threads = [threading.Thread(target=once) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(statuses) == times, "a refusal did not come"
    return set(statuses)


def body(**changes: Any) -> bytes:
    return json.dumps(BODY | changes).encode()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("gzip", gzip.compress(BOMB)), ("deflate", zlib.compress(BOMB)), ("br", b"\x1b" * 99), ("zstd", b"\x28" * 99)],
    ids=["gzip", "deflate", "br", "zstd"],
)
def test_a_body_that_unpacks_a_thousandfold_is_not_unpacked(attacked: Doors, encoding: str, packed: bytes) -> None:
    assert post(attacked, packed, {"content-encoding": encoding}) == {415}


@pytest.mark.parametrize(
    "hostile",
    [
        b'{"model": "tiny", "messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        body(messages=[{"role": "user", "content": "x"}] * 100_000),
        body(chat_template="{% for i in range(10 ** 9) %}x{% endfor %}"),
        body(n=10_000),
        body(stop=["x" * MIB]),
        body(stop=["x" * 1_000] * 1_000),
        body(messages=[{"role": "user", "content": "x" * 600_000}]),
        body(tools=[{"type": "function", "function": {"name": "f"}}] * 100_000),
    ],
    ids=[
        "JSON 10,000 deep",
        "100,000 messages",
        "a template of its own",
        "10,000 choices",
        "a stop string of a megabyte",
        "a thousand stop strings",
        "a word of 600 kB",
        "100,000 tools",
    ],
)
def test_a_body_that_asks_for_too_much_is_refused(attacked: Doors, hostile: bytes) -> None:
    assert post(attacked, hostile) == {400}


def test_a_body_of_a_gigabyte_is_refused_unread(attacked: Doors) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1024):
            yield b" " * MIB

    with attacked.client(EVE) as client, contextlib.suppress(httpx.WriteError):
        assert client.post(CHAT, content=endless(), headers=JSON).status_code == 413


def status_of(doors: Doors, request: generation_pb2.GenerateRequest, caller: Caller = EVE) -> grpc.StatusCode:
    with grpc.insecure_channel(doors.edge.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = service_pb2_grpc.InferenceStub(channel).Generate(request, metadata=caller.metadata, timeout=WAIT_S)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        code: grpc.StatusCode = call.code()
        return code


def stop(text: str) -> generation_pb2.StopCondition:
    return generation_pb2.StopCondition(stop_text=text)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": generation_pb2.SamplingParams(num_sequences=10_000)},
        {"stopping": generation_pb2.StoppingOptions(conditions=[stop("x" * MIB)])},
        {"stopping": generation_pb2.StoppingOptions(conditions=[stop("x" * 1_000)] * 1_000)},
        {"token_ids": generation_pb2.TokenIds(ids=[1] * 600_000)},
    ],
    ids=["10,000 sequences", "a stop text of a megabyte", "a thousand stop texts", "600,000 tokens"],
)
def test_a_message_that_asks_for_too_much_is_refused(attacked: Doors, changes: dict[str, Any]) -> None:
    refusals = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)

    assert status_of(attacked, right_request(**changes)) in refusals


def test_a_message_of_64_megabytes_is_refused(attacked: Doors) -> None:
    request = right_request()
    request.extra.update({"padding": "x" * (64 * MIB)})

    assert status_of(attacked, request) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_message_of_a_gigabyte_is_refused_when_it_is_announced(attacked: Doors) -> None:
    """One kilobyte of it is sent: nobody waits for the rest."""
    seen = http2.announce(attacked.edge.grpc, GENERATE, 1 << 30, EVE.metadata)

    assert seen & {http2.HEADERS, http2.RST_STREAM, http2.GOAWAY}, "the call was not ended"


@pytest.mark.anyio
async def test_a_thousand_idle_streams_of_one_key_leave_others_served(attacked: Doors) -> None:
    async with grpc.aio.insecure_channel(attacked.edge.grpc) as idle:
        channel: Any = idle
        open_call = channel.stream_stream(GENERATE)
        calls = [open_call(metadata=EVE.metadata, timeout=WAIT_S) for _ in range(1_000)]
        await asyncio.sleep(0.5)
        assert sum(not call.done() for call in calls) > 500, "they are held, or this test shows nothing"

        assert await asyncio.to_thread(status_of, attacked, right_request(), BOB) is grpc.StatusCode.OK

        for call in calls:
            call.cancel()
