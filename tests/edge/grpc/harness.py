"""A real gRPC front end on a free port, in front of a worker that says what a test wrote down, in every phase."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from google.protobuf import struct_pb2

from edge.audit import Audit
from edge.authentication import Authentication
from edge.channels import Channels
from edge.core.admission import Admission, AdmissionLimits
from edge.core.fleet import Fleet
from edge.core.headers import HeaderFamilies
from edge.core.life_events import Phase
from edge.core.routing import Router, RouterConfig
from edge.core.seals import Seals
from edge.core.types import ConversationKey, FinishReason, Lineage, Principal, TurnId
from edge.driver import Driver
from edge.grpc.server import GrpcServer
from edge.grpc.signed_hints import SignedHints
from edge.http.models import Catalogue, ServedModel
from edge.http.recent import RecentRequests
from edge.http.route import Parts
from edge.identity import Identities
from edge.legs import LegListener, LegOrder
from edge.settings import Limits
from edge.telemetry import Metrics
from edge.tokenizing.model import TextModel
from edge.trust_settings import Jwt
from enginelink.envelope import Key
from openengine.v1 import generation_pb2, kv_pb2, service_pb2_grpc
from tests.edge.core.lineages import make_lineages
from tests.edge.http.harness import KEY, MAX_CONTEXT, MODEL, OTHER_KEY, Script, ScriptedWorker

DEADLINE_S = 20.0
OPERATOR_KEY = "kr-operator"
INSTANCE = "instance"
VERSION = "1.2.3"
_ids = count(1)


@dataclass
class PhasedWorker(ScriptedWorker):
    """Also plays context legs, whose reference holds the first token of the script, and generation legs, which go on
    from it. `told`: what it was told of conversations; `returns`: of returns."""

    told: list[tuple[str, object]] = field(default_factory=list)
    returns: list[str] = field(default_factory=list)

    def generating(self, conversation: ConversationKey) -> None:
        self.told.append((conversation, "generating"))

    def ended(self, conversation: ConversationKey, reason: FinishReason | None, *, final: bool) -> None:
        self.told.append((conversation, reason))

    def returned(self, lineage: Lineage, turn_id: TurnId, tenant: str) -> None:
        self.returns.append(lineage.conversation)

    async def _play(self, handle: int, script: Script, order: LegOrder, listener: LegListener) -> None:
        if script.error is not None and not script.token_ids:
            # Turned away: it never began.
            listener.failed(script.error, retryable=False)
            return
        if order.phase is Phase.AGGREGATED or script.error is not None:
            await super()._play(handle, script, order, listener)
            return
        while script.hold is not None and not script.hold.is_set():
            await asyncio.sleep(0.005)
        if order.phase is Phase.CONTEXT:
            listener.started(script.cached_tokens)
            listener.prefilled(reference(f"{handle:032x}", script.token_ids[0]), script.token_ids[0], None)
            return
        listener.kv_arrived()
        for token_id in script.token_ids[1 : order.stops.max_tokens]:
            await asyncio.sleep(script.step_s)
            listener.token(token_id, None)
        del self._playing[handle]
        cut = len(script.token_ids) > order.stops.max_tokens
        listener.finished(FinishReason.LENGTH if cut else script.reason)


def reference(session_id: str, first_token: int) -> bytes:
    """As a context worker encodes one."""
    attributes = struct_pb2.Struct()
    attributes.update({"first_gen_tokens": [first_token], "disagg_request_id": "1", "kinroute": {"secret": "s" * 64}})
    message = kv_pb2.KvSessionRef(
        session_id=session_id,
        transfer_backend="kinroute",
        endpoints=[kv_pb2.KvEndpoint(host="127.0.0.1", port=9, protocol="kinroute-tcp")],
        attributes_struct=attributes,
    )
    return message.SerializeToString(deterministic=True)


@dataclass
class Client:
    """A caller with a key, over a connection of its own."""

    address: str
    key: str = KEY

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.inference = service_pb2_grpc.InferenceStub(self.channel)
        self.control = service_pb2_grpc.ControlStub(self.channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def metadata(self, pairs: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
        return [("x-api-key", self.key), *pairs]

    def generate(self, request: generation_pb2.GenerateRequest, pairs: Sequence[tuple[str, str]] = ()) -> Any:
        """The call: iterate over its responses."""
        return self.inference.Generate(request, timeout=DEADLINE_S, metadata=self.metadata(pairs))

    def answer(
        self, request: generation_pb2.GenerateRequest, pairs: Sequence[tuple[str, str]] = ()
    ) -> list[generation_pb2.GenerateResponse]:
        return list(self.generate(request, pairs))

    def ask(self, method: str, request: Any, pairs: Sequence[tuple[str, str]] = ()) -> Any:
        """A unary call of Control."""
        return getattr(self.control, method)(request, timeout=DEADLINE_S, metadata=self.metadata(pairs))

    def refused(self, request: Any, pairs: Sequence[tuple[str, str]] = (), method: str = "") -> tuple[Any, str]:
        """Status and message of a call that must fail: of Generate, or of a method of Control."""
        with pytest.raises(grpc.RpcError) as caught:
            self.ask(method, request, pairs) if method else self.answer(request, pairs)
        call: Any = caught.value
        return call.code(), call.details()


def request(prompt: str | Sequence[int] = "Hi", max_tokens: int = 16, **fields: Any) -> generation_pb2.GenerateRequest:
    """`extra` is a dict; other fields replace what stands here."""
    extra = struct_pb2.Struct()
    extra.update(fields.pop("extra", {}))
    given: dict[str, Any] = {
        "request_id": f"test-{next(_ids)}",
        "model": MODEL,
        "stopping": generation_pb2.StoppingOptions(max_tokens=max_tokens),
        "extra": extra,
    }
    if isinstance(prompt, str):
        given["prompt"] = prompt
    else:
        given["token_ids"] = generation_pb2.TokenIds(ids=prompt)
    given |= fields
    for name in ("prompt", "token_ids"):
        # The later of two inputs would win.
        if name in fields:
            given.pop("token_ids" if name == "prompt" else "prompt", None)
    return generation_pb2.GenerateRequest(**given)


def text_of(responses: Sequence[generation_pb2.GenerateResponse]) -> str:
    return "".join(response.token.text for response in responses)


def ids_of(responses: Sequence[generation_pb2.GenerateResponse]) -> list[int]:
    return [info.token_id for response in responses for info in response.token.tokens]


def events_of(responses: Sequence[generation_pb2.GenerateResponse]) -> list[str]:
    return [str(response.WhichOneof("event")) for response in responses]


@dataclass
class FrontEnd:
    """The running server."""

    worker: PhasedWorker
    driver: Driver
    parts: Parts
    address: str
    run: Callable[[Callable[[], Any]], Any]
    """Call something on the server's loop, a coroutine too, and wait for its result."""

    def client(self, key: str = KEY) -> Client:
        return Client(self.address, key)

    def held(self) -> tuple[int, int, int]:
        """Requests, turns and legs that run now."""
        legs = sum(worker.in_flight for worker in self.driver.fleet.workers.values())
        return self.parts.admission.in_flight, len(self.driver.running), legs

    def settle(self) -> None:
        """Until nothing runs."""
        until(lambda: self.held() == (0, 0, 0), lambda: f"still held: {self.held()}")


def until(is_so: Callable[[], bool], why: Callable[[], str] = lambda: "it did not come true") -> None:
    end_s = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < end_s, why()
        time.sleep(0.01)


@contextmanager
def front_end(
    folder: Path,
    *,
    limits: Limits | None = None,
    admission: AdmissionLimits | None = None,
    ready: bool = True,
    seals: Seals | None = None,
    workers: Sequence[str] = (),
    signed_hints: SignedHints | None = None,
    jwt: Jwt | None = None,
    jwks_interval_s: float = 10.0,
) -> Iterator[FrontEnd]:
    """One worker for both phases; `workers` are further addresses that the fleet knows, of nobody who is ready. The
    server has a thread and a loop of its own; everything ends with the block. `jwt`: how tokens are believed, besides
    the API keys."""
    limits = limits or Limits()
    worker = PhasedWorker()
    fleet = Fleet([worker.worker_id, *workers], [worker.worker_id, *workers])
    if ready:
        fleet.joined(worker.worker_id, INSTANCE, MAX_CONTEXT, 4)
    driver = Driver(fleet, Router(RouterConfig(), fleet), [worker])
    text = TextModel.load(folder)
    keys = {
        hashlib.sha256(key.encode()).hexdigest(): principal
        for key, principal in {
            KEY: Principal("acme", "ann", frozenset({"affinity"}), "key-acme"),
            OTHER_KEY: Principal("other", "bob", frozenset(), "key-other"),
            OPERATOR_KEY: Principal("house", "ops", frozenset({"operator"}), "key-ops"),
        }.items()
    }
    metrics = Metrics()
    authentication = Authentication(jwt, keys, min_interval_s=jwks_interval_s)
    parts = Parts(
        Identities(
            authentication.authenticator,
            HeaderFamilies(),
            make_lineages(),
            Audit(metrics.registry),
            seek=authentication.seek,
        ),
        Admission(admission or AdmissionLimits()),
        Catalogue([ServedModel(MODEL, ["other-name"], text)]),
        driver,
        limits,
        metrics,
        RecentRequests(),
    )
    started: dict[str, Any] = {}
    is_up = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        server = GrpcServer(
            parts,
            seals or Seals((Key("k", b"k" * 32),)),
            Channels().open,
            instance_id="edge-test",
            version=VERSION,
            signed_hints=signed_hints,
        )
        await server.start("127.0.0.1:0")
        started.update(loop=asyncio.get_running_loop(), stop=stop, address=server.address)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(driver.run()), tasks.create_task(authentication.run())]
            is_up.set()
            await stop.wait()
            await server.stop(0.2)
            for task in running:
                task.cancel()

    def run(work: Callable[[], Any]) -> Any:
        async def call() -> Any:
            result = work()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), started["loop"]).result(DEADLINE_S)

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert is_up.wait(DEADLINE_S), "the server did not start"
        yield FrontEnd(worker, driver, parts, started["address"], run)
    finally:
        if started:
            started["loop"].call_soon_threadsafe(started["stop"].set)
        thread.join(20.0)
        text.close()
    assert not thread.is_alive(), "the server did not stop"
