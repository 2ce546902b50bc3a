"""A load of streamed completions, in a process of its own: `python -m bench.http_load`. Prints what it saw as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

import uvloop


@dataclass(slots=True)
class Seen:
    """Milliseconds: from a request to its first token, and between the chunks that follow."""

    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    failures: int = 0

    def summary(self) -> dict[str, float]:
        return {
            "ttft_p50_ms": percentile(self.ttft_ms, 0.5),
            "ttft_p99_ms": percentile(self.ttft_ms, 0.99),
            "gap_p99_ms": percentile(self.gap_ms, 0.99),
            "failures": self.failures,
        }


def percentile(values: list[float], share: float) -> float:
    """Of no values: 0."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def client(host: str, port: int, request: bytes, requests: int, seen: Seen, wait_s: float) -> None:
    """One keep-alive connection, one request after the other, the first after `wait_s`."""
    await asyncio.sleep(wait_s)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for _ in range(requests):
            last_s = time.perf_counter()
            writer.write(request)
            first = True
            ok = b" 200 " in await reader.readline()
            while (line := await reader.readline()) not in (b"0\r\n", b""):
                if line.startswith(b'data: {"id"') and b'"content":"' in line and b'"content":""' not in line:
                    now_s = time.perf_counter()
                    (seen.ttft_ms if first else seen.gap_ms).append(1000 * (now_s - last_s))
                    first, last_s = False, now_s
            await reader.readline()
            if not ok or first:
                seen.failures += 1
    finally:
        writer.close()


async def load(
    address: str, key: str, model: str, clients: int, requests: int, tokens: int, spread_ms: float = 0.0
) -> Seen:
    """`spread_ms`: over how long the clients begin, evenly."""
    host, _, port = address.rpartition(":")
    seen = Seen()

    def wait_s(number: int) -> float:
        return spread_ms / 1000 * number / clients

    def request(number: int) -> bytes:
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": f"Tell me about number {number}, in some detail, please."}],
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(host, int(port), request(number), requests, seen, wait_s(number)))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=10, help="of each client")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--spread-ms", type=float, default=0.0, help="over how long the clients begin")
    given = parser.parse_args()
    seen = uvloop.run(
        load(given.address, given.key, given.model, given.clients, given.requests, given.tokens, given.spread_ms)
    )
    sys.stdout.write(json.dumps(seen.summary()) + "\n")


if __name__ == "__main__":
    main()
