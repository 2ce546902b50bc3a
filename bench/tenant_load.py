"""Tenants' requests through an edge, as an open load: `python -m bench.tenant_load`. Prints what some waited as JSON.

Each tenant is a key of the file, in its order. The first `--tenants` are measured. Requests come at random times; those
of `--flooders`, the last keys, as fast as they are answered, over `--connections` each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path

import uvloop

from bench.http_load import percentile

ANSWER_TOKENS = 8


class Load:
    def __init__(self, address: str, model: str, prompts: tuple[int, int]) -> None:
        self._address = address
        self._model = model
        self._prompts = prompts
        self.waits_ms: list[float] = []
        self.failures = 0

    async def random_times(self, key: str, dice: random.Random, mean_s: float, until_s: float, *, counts: bool) -> None:
        """One tenant's requests, each on a connection of its own, however many wait."""
        async with asyncio.TaskGroup() as tasks:
            at_s = time.perf_counter() + dice.expovariate(1 / mean_s)
            while at_s < until_s:
                await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                tasks.create_task(self._request(key, dice.randrange(*self._prompts), counts=counts))
                at_s += dice.expovariate(1 / mean_s)

    async def flood(self, key: str, dice: random.Random, until_s: float) -> None:
        while time.perf_counter() < until_s:
            await self._request(key, dice.randrange(*self._prompts), counts=False)

    async def _request(self, key: str, tokens: int, *, counts: bool) -> None:
        prompt = [97 + (tokens + at) % 26 for at in range(tokens)]
        body = json.dumps(
            {"model": self._model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address}\r\nAuthorization: Bearer {key}\r\n"
            f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        host, _, port = self._address.rpartition(":")
        began_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write((head + body).encode())
            wait_ms = 0.0
            while line := await reader.readline():
                if not wait_ms and line.startswith(b'data: {"id"'):
                    wait_ms = 1000 * (time.perf_counter() - began_s)
            if not wait_ms:
                self.failures += 1
            elif counts:
                self.waits_ms.append(wait_ms)
        finally:
            writer.close()


async def load(given: argparse.Namespace) -> Load:
    keys = json.loads(given.keys.read_text())
    one = Load(given.address, given.model, (given.shortest, given.longest))
    until_s = time.perf_counter() + given.seconds
    async with asyncio.TaskGroup() as tasks:
        for number, key in enumerate(keys):
            dice = random.Random(1000 * given.seed + number)
            if number >= len(keys) - given.flooders:
                for connection in range(given.connections):
                    tasks.create_task(one.flood(key, random.Random(given.seed + connection), until_s))
            else:
                counts = number < given.tenants
                tasks.create_task(one.random_times(key, dice, given.mean_s, until_s, counts=counts))
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--keys", type=Path, required=True, help="a JSON list")
    parser.add_argument("--tenants", type=int, required=True, help="that are measured")
    parser.add_argument("--flooders", type=int, default=0)
    parser.add_argument("--connections", type=int, default=64, help="of each flooder")
    parser.add_argument("--mean-s", type=float, required=True, help="between two requests of a tenant")
    parser.add_argument("--shortest", type=int, required=True, help="prompt, in tokens")
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    done = uvloop.run(load(parser.parse_args()))
    seen = {"requests": len(done.waits_ms), "ttft_p99_ms": percentile(done.waits_ms, 0.99), "failures": done.failures}
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
