"""A worker without a model: `python -m bench.fake_worker`. Speaks EngineLink, with fixed step times.

Token n of an answer is a function of the prompt, so a client can tell whether it got its own, whole. Handoffs are
made and checked: a generation leg must present what a context leg of some fake worker of this host gave. Switches break
it at a chosen point of a request, for tests of what the edge does then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop

from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import (
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    model_pb2,
    server_pb2,
    service_pb2_grpc,
)

FAULTS = (
    "none",
    "die-before-started",
    "die-after-started",
    "die-after-prefill",
    "die-in-pull",
    "die-after-first-token",
    "die-mid-decode",
    "refuse",
    "fail-retryable",
    "silent",
)
FIRST_LETTER, LETTERS = 97, 26


def answer_token(prompt: bytes, number: int) -> int:
    """Token `number` of the answer to `prompt` (packed ids): a lower-case letter in a byte-level vocabulary."""
    length = len(prompt) // 4
    last = int.from_bytes(prompt[-4:], "little") if prompt else 0
    return FIRST_LETTER + (length + last + number) % LETTERS


@dataclass(slots=True)
class Leg:
    """One accepted request. `produced` counts resumed tokens and a handoff's first token too."""

    handle: int
    phase: int
    prompt: bytes
    max_tokens: int
    produced: int
    waits: int = 0
    started: bool = False
    arrived: bool = False
    pinned: bool = False


@dataclass(slots=True)
class Options:
    step_ms: float = 10.0
    prefill_steps: int = 1
    pull_steps: int = 1
    fault: str = "none"
    fault_after: int = 0
    max_context_length: int = 262_144


@dataclass(slots=True, eq=False)
class Link:
    """One edge's stream and its requests."""

    queue: asyncio.Queue[link_pb2.WorkerMessage] = field(default_factory=asyncio.Queue)
    legs: dict[int, Leg] = field(default_factory=dict)


class FakeWorker(link_pb2_grpc.EngineLinkServicer, service_pb2_grpc.ControlServicer):  # type: ignore[misc]
    """Steps every `step_ms` while it has requests."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.instance_id = secrets.token_hex(8)
        self._links: set[Link] = set()
        self._number = 0
        self._seen = 0
        self._wake = asyncio.Event()

    async def GetServerInfo(self, request: Any, context: Any) -> server_pb2.ServerInfo:
        return server_pb2.ServerInfo(
            engine_name="kinroute-fake", instance_id=self.instance_id, schema_revision=1, minimum_client_revision=1
        )

    async def Health(self, request: Any, context: Any) -> lifecycle_pb2.HealthResponse:
        return lifecycle_pb2.HealthResponse(state=lifecycle_pb2.HEALTH_STATE_READY)

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        hello = await context.read()
        assert hello.HasField("hello")
        link = Link()
        self._links.add(link)
        welcome = link_pb2.Welcome(
            server=await self.GetServerInfo(None, None),
            model=model_pb2.ModelInfo(max_context_length=self.options.max_context_length),
            load=self._load(),
        )
        await context.write(link_pb2.WorkerMessage(welcome=welcome))
        writer = asyncio.create_task(self._write(link, context))
        try:
            while isinstance(message := await context.read(), link_pb2.EdgeMessage):
                for submit in message.submits:
                    self._submit(link, submit)
                for cancel in message.cancels:
                    link.legs.pop(cancel.handle, None)
        finally:
            writer.cancel()
            self._links.discard(link)

    async def _write(self, link: Link, context: Any) -> None:
        while True:
            await context.write(await link.queue.get())

    def _load(self) -> link_pb2.Load:
        running = sum(not leg.pinned for link in self._links for leg in link.legs.values())
        return link_pb2.Load(running_requests=running, total_pages=1)

    def _submit(self, link: Link, submit: link_pb2.Submit) -> None:
        self._seen += 1
        if self._faulty() and self.options.fault in ("refuse", "fail-retryable"):
            retryable = self.options.fault == "fail-retryable"
            code = error_pb2.ERROR_CODE_OVERLOADED if retryable else error_pb2.ERROR_CODE_INVALID_ARGUMENT
            error = error_pb2.EngineError(code=code, message="told to refuse", retryable=retryable)
            self._send(link, link_pb2.Step(events=[link_pb2.Event(handle=submit.handle, error=error)]))
            return
        prompt = submit.token_ids[: len(submit.token_ids) - 4 * submit.resumed_tokens]
        leg = Leg(submit.handle, submit.phase, prompt, submit.stopping.max_tokens, submit.resumed_tokens)
        if submit.phase == link_pb2.PHASE_GENERATION:
            session = kv_pb2.KvSessionRef.FromString(submit.kv_session)
            known = session.attributes_struct.fields["first_gen_tokens"].list_value.values
            assert session.transfer_backend == "fake"
            assert int(known[0].number_value) == answer_token(prompt, leg.produced), "a session of another prompt"
            leg.produced += 1
            leg.waits = self.options.pull_steps
            self._die_if("die-in-pull")
        else:
            leg.waits = self.options.prefill_steps
            self._die_if("die-before-started")
        link.legs[leg.handle] = leg
        self._wake.set()

    def _faulty(self) -> bool:
        return self._seen > self.options.fault_after

    def _die_if(self, fault: str) -> None:
        if self.options.fault == fault and self._faulty():
            os._exit(9)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not any(not leg.pinned for link in self._links for leg in link.legs.values()):
                self._wake.clear()
                await self._wake.wait()
            began_s = loop.time()
            await asyncio.sleep(self.options.step_ms / 1000)
            if self.options.fault == "silent" and self._faulty():
                continue
            self._number += 1
            for link in list(self._links):
                self._step(link)
            await asyncio.sleep(max(0.0, began_s + self.options.step_ms / 1000 - loop.time()))

    def _step(self, link: Link) -> None:
        handles, token_ids = array("I"), array("I")
        step = link_pb2.Step(number=self._number)
        reached: set[str] = set()
        for leg in list(link.legs.values()):
            if leg.pinned:
                continue
            if not leg.started and leg.phase != link_pb2.PHASE_GENERATION:
                leg.started = True
                step.events.append(link_pb2.Event(handle=leg.handle, started=link_pb2.Started()))
                reached.add("die-after-started")
            leg.waits -= 1
            if leg.waits > 0:
                continue
            if leg.phase == link_pb2.PHASE_GENERATION and not leg.arrived:
                leg.arrived = True
                step.events.append(link_pb2.Event(handle=leg.handle, kv_arrived=link_pb2.KvArrived()))
            token = answer_token(leg.prompt, leg.produced)
            if leg.produced >= leg.max_tokens:
                step.events.append(self._finished(link, leg))
                continue
            leg.produced += 1
            if leg.phase == link_pb2.PHASE_CONTEXT and leg.produced < leg.max_tokens:
                leg.pinned = True
                step.events.append(link_pb2.Event(handle=leg.handle, prefill_ready=_ready(leg, token)))
                reached.add("die-after-prefill")
            elif leg.produced < leg.max_tokens:
                handles.append(leg.handle)
                token_ids.append(token)
                reached.add("die-after-first-token" if leg.produced <= 2 else "die-mid-decode")
            else:
                step.events.append(link_pb2.Event(handle=leg.handle, token=generation_pb2.TokenInfo(token_id=token)))
                step.events.append(self._finished(link, leg))
        if handles or step.events:
            step.handles, step.token_ids = handles.tobytes(), token_ids.tobytes()
            self._send(link, step)
        if self.options.fault in reached and self._faulty():
            # Let what was sent reach the edge, then go.
            asyncio.get_running_loop().call_later(0.2, os._exit, 9)
            self.options.fault = "silent"

    def _finished(self, link: Link, leg: Leg) -> link_pb2.Event:
        del link.legs[leg.handle]
        finished = link_pb2.Finished(reason=generation_pb2.FINISH_REASON_LENGTH)
        return link_pb2.Event(handle=leg.handle, finished=finished)

    def _send(self, link: Link, step: link_pb2.Step) -> None:
        step.number = self._number
        step.load.CopyFrom(self._load())
        link.queue.put_nowait(link_pb2.WorkerMessage(step=step))


def _ready(leg: Leg, token: int) -> link_pb2.PrefillReady:
    session = kv_pb2.KvSessionRef(session_id=secrets.token_hex(16), transfer_backend="fake")
    session.attributes_struct.update({"first_gen_tokens": [token]})
    return link_pb2.PrefillReady(
        kv_session=session.SerializeToString(), first_token=generation_pb2.TokenInfo(token_id=token)
    )


async def serve(address: str, options: Options) -> None:
    """Until cancelled; says where it listens as one JSON line on stdout."""
    worker = FakeWorker(options)
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 64 << 20),))
    link_pb2_grpc.add_EngineLinkServicer_to_server(worker, server)
    service_pb2_grpc.add_ControlServicer_to_server(worker, server)
    host = address.rpartition(":")[0]
    port = server.add_insecure_port(address)
    await server.start()
    sys.stdout.write(json.dumps({"event": "listening", "grpc": f"{host}:{port}", "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    try:
        await worker.run()
    finally:
        await server.stop(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--prefill-steps", type=int, default=1)
    parser.add_argument("--pull-steps", type=int, default=1)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fault-after", type=int, default=0, help="requests that are served well before the fault")
    parser.add_argument("--max-context-length", type=int, default=262_144)
    given = parser.parse_args()
    options = Options(
        given.step_ms, given.prefill_steps, given.pull_steps, given.fault, given.fault_after, given.max_context_length
    )
    uvloop.run(serve(given.listen, options))


if __name__ == "__main__":
    main()
