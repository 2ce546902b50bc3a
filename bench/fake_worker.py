"""A worker without a model: `python -m bench.fake_worker`. Speaks EngineLink and OpenEngine, with fixed step times.

A client can tell from an answer whether it got its own, whole. Handoffs are made and checked: a generation leg must
present the reference that a context leg of some fake worker made for its prompt. Switches break it at a chosen point of
a request, for tests of what the edge does then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

import grpc
import uvloop

from bench.fake_engine import FAULTS, FakeEngine, Link, Options
from bench.fake_openengine import FakeControl, FakeInference, model_info, server_info
from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import service_pb2_grpc

OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)


class FakeLink(link_pb2_grpc.EngineLinkServicer):  # type: ignore[misc]  # generated code is untyped
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        hello = await context.read()
        assert hello.HasField("hello")
        engine = self._engine
        welcome = link_pb2.Welcome(server=server_info(engine), model=model_info(engine), load=engine.load)
        await context.write(link_pb2.WorkerMessage(welcome=welcome))
        link = engine.attach()
        writer = asyncio.create_task(self._write(link, context))
        try:
            while isinstance(message := await context.read(), link_pb2.EdgeMessage):
                for submit in message.submits:
                    engine.submit(link, submit)
                for cancel in message.cancels:
                    engine.cancel(link, cancel.handle)
        finally:
            writer.cancel()
            engine.detach(link)

    async def _write(self, link: Link, context: Any) -> None:
        while True:
            await context.write(link_pb2.WorkerMessage(step=await link.steps.get()))


async def serve(address: str, options: Options, *, with_link: bool) -> None:
    """Until cancelled; says where it listens as one JSON line on stdout."""
    engine = FakeEngine(options)
    server = grpc.aio.server(options=OPTIONS)
    if with_link:
        link_pb2_grpc.add_EngineLinkServicer_to_server(FakeLink(engine), server)
    service_pb2_grpc.add_ControlServicer_to_server(FakeControl(engine), server)
    service_pb2_grpc.add_InferenceServicer_to_server(FakeInference(engine), server)
    host = address.rpartition(":")[0]
    port = server.add_insecure_port(address)
    await server.start()
    sys.stdout.write(json.dumps({"event": "listening", "grpc": f"{host}:{port}", "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    try:
        await engine.run()
    finally:
        await server.stop(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--prefill-steps", type=int, default=1)
    parser.add_argument("--tokens-per-step", type=int, default=0, help="of prompts, shared by tenants in turns")
    parser.add_argument("--pull-steps", type=int, default=1)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fault-after", type=int, default=0, help="requests that are served well before the fault")
    parser.add_argument("--cached-tokens", type=int, default=0, help="what every prefill says that it found cached")
    parser.add_argument("--max-context-length", type=int, default=262_144)
    parser.add_argument("--keys-file", default="", help="take lineage that these keys prove")
    parser.add_argument("--no-enginelink", action="store_true", help="speak OpenEngine alone")
    given = vars(parser.parse_args())
    address, with_link = given.pop("listen"), not given.pop("no_enginelink")
    uvloop.run(serve(address, Options(**given), with_link=with_link))


if __name__ == "__main__":
    main()
