"""The same load straight to a worker over EngineLink: `python -m bench.link_load`. Prints what it saw as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from array import array
from typing import Any

import grpc
import uvloop

from bench.http_load import Seen
from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import generation_pb2


class Load:
    """`clients` requests at a time on one link, aggregated phase, until each client had its number of answers.

    The clients begin evenly over `spread_ms`.
    """

    def __init__(self, stream: Any, clients: int, requests: int, tokens: int, spread_ms: float) -> None:
        self._pause_s = spread_ms / 1000 / clients
        self._stream = stream
        self._tokens = tokens
        self._left = [requests] * clients
        self._live: dict[int, tuple[int, float, bool]] = {}
        self._handle = 0
        self.seen = Seen()

    def _submit(self, client: int) -> link_pb2.Submit:
        self._handle += 1
        self._left[client] -= 1
        self._live[self._handle] = (client, time.perf_counter(), True)
        return link_pb2.Submit(
            handle=self._handle,
            request_id=f"load-{self._handle}",
            model="fake",
            phase=link_pb2.PHASE_AGGREGATED,
            token_ids=array("I", range(client, client + 40)).tobytes(),
            stopping=generation_pb2.StoppingOptions(max_tokens=self._tokens),
        )

    def _token(self, handle: int) -> None:
        client, last_s, first = self._live[handle]
        now_s = time.perf_counter()
        (self.seen.ttft_ms if first else self.seen.gap_ms).append(1000 * (now_s - last_s))
        self._live[handle] = (client, now_s, False)

    async def _start(self) -> None:
        for client in range(len(self._left)):
            await self._stream.write(link_pb2.EdgeMessage(submits=[self._submit(client)]))
            await asyncio.sleep(self._pause_s)

    async def run(self) -> Seen:
        await self._stream.write(link_pb2.EdgeMessage(hello=link_pb2.Hello(revision=1, edge_id="load")))
        await self._stream.read()
        starting = asyncio.create_task(self._start())
        while self._live or not starting.done():
            step = (await self._stream.read()).step
            for handle in array("I", step.handles):
                self._token(handle)
            again = []
            for event in step.events:
                if event.HasField("token"):
                    self._token(event.handle)
                elif event.HasField("finished"):
                    client, _, _ = self._live.pop(event.handle)
                    if self._left[client]:
                        again.append(self._submit(client))
            if again:
                await self._stream.write(link_pb2.EdgeMessage(submits=again))
        return self.seen


async def load(address: str, clients: int, requests: int, tokens: int, spread_ms: float) -> Seen:
    async with grpc.aio.insecure_channel(address) as channel:
        return await Load(link_pb2_grpc.EngineLinkStub(channel).Connect(), clients, requests, tokens, spread_ms).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=10, help="of each client")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--spread-ms", type=float, default=0.0, help="over how long the clients begin")
    given = parser.parse_args()
    seen = uvloop.run(load(given.address, given.clients, given.requests, given.tokens, given.spread_ms))
    sys.stdout.write(json.dumps(seen.summary()) + "\n")


if __name__ == "__main__":
    main()
