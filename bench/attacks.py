"""What attacks on an edge cost another tenant: the gaps between its streamed tokens beside each, and without.

A real edge with both listeners, in front of a fake worker (a step of 10 ms). A well-behaved tenant streams on four
connections; beside it another tenant does one thing that exhausts, as fast as it can, from another process. Each attack
is measured for a few seconds right after as long without it, in one run. `of_quiet`: p99 against that.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from bench.http_load import Seen, load, percentile
from bench.parts import configured, embedded_model, process
from edge.keyring import Keyring

MODEL = "bench"
STEP_MS = 10.0
TOKENS = 64
CLIENTS = 4
ROUNDS = 5
"""Answers to each connection: some three seconds."""
ATTACKERS = 4
KEY = "kr-bench-attacker"
MIB = 1 << 20
ANSWER_S = 30.0
GENERATE = "/openengine.v1.Inference/Generate"


def run() -> dict[str, Any]:
    """Rows by attack."""
    model = embedded_model()
    with tempfile.TemporaryDirectory() as folder, process("bench.fake_worker") as (worker, _):
        keyring = Keyring.open(Path(folder) / "keys.json")
        _add_attacker(keyring.path)
        config = {
            "listen": {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "model": {"name": MODEL, "path": str(model)},
            "keys_file": str(keyring.path),
            "context_servers": [worker["grpc"]],
            "generation_servers": [worker["grpc"]],
            "log": {"level": "error"},
        }
        with configured("edge", config, until="ready") as (edge, _):
            _gaps(edge["http"], keyring.local_key)
            rows = [_row(name, edge, keyring.local_key) for name in ATTACKS]
    return {"what": "attacks", "step_ms": STEP_MS, "clients": CLIENTS, "attackers": ATTACKERS, "rows": rows}


def _add_attacker(key_file: Path) -> None:
    content = json.loads(key_file.read_text())
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    content["api_keys"].append({"id": "attacker", "sha256": digest, "tenant": "evil", "subject": "eve"})
    key_file.write_text(json.dumps(content))


def _row(name: str, edge: Mapping[str, str], key: str) -> dict[str, Any]:
    quiet = _gaps(edge["http"], key)
    with subprocess.Popen(
        [sys.executable, "-m", "bench.attacks", name, "--http", edge["http"], "--grpc", edge["grpc"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # it has begun
        beside = _gaps(edge["http"], key)
        told, _ = attacker.communicate(input="stop\n", timeout=2 * ANSWER_S)
    return {
        "attack": name,
        "attempts_s": json.loads(told)["attempts_s"],
        "quiet_gap_p99_ms": percentile(quiet.gap_ms, 0.99),
        "gap_p50_ms": percentile(beside.gap_ms, 0.5),
        "gap_p99_ms": percentile(beside.gap_ms, 0.99),
        "gap_max_ms": max(beside.gap_ms),
        "of_quiet": percentile(beside.gap_ms, 0.99) / percentile(quiet.gap_ms, 0.99),
        "failures": beside.failures,
    }


def _gaps(address: str, key: str) -> Seen:
    return asyncio.run(load(address, key, MODEL, CLIENTS, ROUNDS, TOKENS, spread_ms=CLIENTS * STEP_MS))


Attack = Callable[[str, str], Awaitable[None]]
"""Tries once: addresses of HTTP and gRPC."""


def _post(body: bytes, *more: str) -> Attack:
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {KEY}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *more,
    ]
    data = "\r\n".join(head).encode() + b"\r\n\r\n" + body

    async def attempt(http: str, _: str) -> None:
        await _say(http, data)

    return attempt


async def _say(address: str, data: bytes, wait_s: float = ANSWER_S) -> None:
    """Send it all, and wait until the edge hangs up."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(wait_s):
                writer.write(data)
                await writer.drain()
                await reader.read()
    finally:
        writer.close()


def _asking(**changes: Any) -> bytes:
    messages = [{"role": "user", "content": "Hello."}]
    return json.dumps({"model": MODEL, "max_tokens": 1, "messages": messages} | changes).encode()


async def _silent_streams(_: str, address: str) -> None:
    """A thousand calls that never send their message."""
    async with grpc.aio.insecure_channel(address) as channel:
        opened: Any = channel
        open_call = opened.stream_stream(GENERATE)
        metadata = (("authorization", f"Bearer {KEY}"),)
        calls = [open_call(metadata=metadata, timeout=ANSWER_S) for _ in range(1_000)]
        await asyncio.sleep(1.0)
        for call in calls:
            call.cancel()


async def _large_messages(_: str, address: str) -> None:
    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        opened: Any = channel
        call = opened.unary_stream(GENERATE)(
            b"\0" * (32 * MIB), metadata=(("authorization", f"Bearer {KEY}"),), timeout=ANSWER_S
        )
        with suppress(grpc.RpcError):
            await call.read()


async def _slow_headers(http: str, _: str) -> None:
    await _say(http, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ", wait_s=0.5)


WORD = "x" * 600_000
ATTACKS: dict[str, Attack] = {
    "headers without an end": _slow_headers,
    "no key": _post(_asking(), f"x-api-key: {os.urandom(8).hex()}"),
    "a body that unpacks a thousandfold": _post(gzip.compress(b" " * (32 * MIB)), "content-encoding: gzip"),
    "JSON 10,000 deep": _post(b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    "100,000 messages": _post(_asking(messages=[{"role": "user", "content": "x"}] * 100_000)),
    "10,000 choices": _post(_asking(n=10_000)),
    "a megabyte of stop strings": _post(_asking(stop=["x" * 1_000] * 1_000)),
    "a word of 600 kB": _post(_asking(messages=[{"role": "user", "content": WORD}])),
    "1,000 idle gRPC streams": _silent_streams,
    "gRPC messages of 32 MiB": _large_messages,
}


async def _attack(attempt: Attack, http: str, address: str) -> None:
    """Until a line comes on stdin; says how often it tried, by the second."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    attempts, began_s = 0, time.perf_counter()
    sys.stdout.write("begun\n")
    sys.stdout.flush()

    async def again() -> None:
        nonlocal attempts
        while not stop.is_set():
            await attempt(http, address)
            attempts += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(ATTACKERS):
            tasks.create_task(again())
    sys.stdout.write(json.dumps({"attempts_s": attempts / (time.perf_counter() - began_s)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", required=True)
    given = parser.parse_args()
    asyncio.run(_attack(ATTACKS[given.attack], given.http, given.grpc))


if __name__ == "__main__":
    main()
