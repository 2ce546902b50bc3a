"""A whole system of real processes, and a family in its cache that attackers go for."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
from google.protobuf import struct_pb2

from openengine.v1 import generation_pb2, service_pb2_grpc
from tests.attacks.callers import ANN, BOB, Caller, add_callers
from tests.attacks.doors import CHAT
from tests.e2e.system import Part, System
from tests.tiny_models import make_tiny_model

WAIT_S = 60.0
Protocol = Literal["http", "grpc"]
PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")
CACHE: dict[str, Any] = {
    "tokens_per_block": 4,
    "max_tokens": 8_192,
    "block_reuse_config": {
        "policy": "per_conversation",
        "finished_subagent_priority": 1,
        "finished_subagent_min_idle_iterations": 0,
    },
}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Told:
    """What a caller was answered: a status of HTTP, or the like of gRPC's. `conversation`: as workers know it."""

    status: int
    conversation: str = ""
    token: str = ""
    message: str = ""


_STATUS = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}


@dataclass(frozen=True)
class Family:
    """Ann's parent and its finished child, as she names them, and as workers know them."""

    parent: str
    child: str
    parent_key: str
    child_key: str
    token: str


@dataclass(frozen=True)
class Attacked:
    """One context worker, one generation worker, one edge with both listeners."""

    system: System
    context: Part
    generation: Part
    edge: Part
    channel: grpc.Channel
    numbers: Iterator[int] = field(default_factory=lambda: _numbers)

    @property
    def inference(self) -> Any:
        return service_pb2_grpc.InferenceStub(self.channel)

    @property
    def control(self) -> Any:
        return service_pb2_grpc.ControlStub(self.channel)

    def ask(
        self,
        protocol: Protocol,
        caller: Caller,
        text: str,
        headers: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Told:
        """One whole answer, or why there is none. `extra`: members of the body, or of OpenEngine's `extra`."""
        if protocol == "grpc":
            return self._ask_grpc(caller, text, headers or {}, extra or {})
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2} | (extra or {})
        answer = httpx.post(self.edge.http + CHAT, json=body, headers=caller.headers | (headers or {}), timeout=WAIT_S)
        if answer.status_code != 200:
            return Told(answer.status_code, message=answer.json()["error"]["message"])
        receipt = json.loads(answer.headers["x-kinroute-receipt"])
        return Told(200, receipt["conversation"], answer.headers.get("x-kinroute-lineage", ""))

    def _ask_grpc(self, caller: Caller, text: str, headers: dict[str, str], extra: dict[str, Any]) -> Told:
        call = self.inference.Generate(
            request(text, next(self.numbers), extra),
            metadata=[*caller.metadata, *((name.lower(), value) for name, value in headers.items())],
            timeout=WAIT_S,
        )
        try:
            events = [response.WhichOneof("event") for response in call]
        except grpc.RpcError:
            return Told(_STATUS[call.code()], message=call.details())
        assert events[-1] == "finished", events
        begun = dict(call.initial_metadata())
        return Told(200, token=str(begun.get("x-kinroute-lineage", "")))

    def family(self) -> Family:
        """A fresh one, in the context worker's cache, owned and not demoted."""
        number = next(self.numbers)
        parent, child = f"plan-{number}", f"sub-{number}"
        first = self.ask("http", ANN, f"{number}: plan the work.", own(parent))
        second = self.ask("http", ANN, f"{number}: do your part of the work, and read this.", own(child, parent))
        assert (first.status, second.status) == (200, 200)
        family = Family(parent, child, first.conversation, second.conversation, first.token)
        self.wait_for(family, "idle")
        return family

    def picture(self, family: Family) -> dict[str, Any]:
        """The victim's part of the cache: its conversations with parents, states, blocks and priorities."""
        listed = [*self._families(family.parent_key), *self._families(family.child_key)]
        return {one["conversation"]: {**one, "idle_steps": None} for one in listed}

    def state(self, family: Family) -> str:
        """Of the child."""
        return str(self._families(family.child_key)[0]["state"])

    def wait_for(self, family: Family, state: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while (now := self.state(family)) != state:
            assert time.monotonic() < end_s, f"the child is {now}, not {state}"
            time.sleep(0.02)

    def priorities(self, conversation: str) -> list[int]:
        return list(self._families(conversation)[0]["priority"])

    def settled(self) -> None:
        """Whatever was said before this was heard by the context worker: a later family's return is."""
        other = self.family()
        self.returns(other)
        self.wait_for(other, "demoted")

    def returns(self, family: Family) -> None:
        """What only the victim may bring about."""
        assert self.ask("http", ANN, f"{next(self.numbers)}: and now?", own(family.parent)).status == 200

    def require_others_served(self) -> None:
        assert self.ask("http", BOB, "Good morning.").status == 200

    def _families(self, conversation: str) -> list[dict[str, Any]]:
        url = f"{self.context.admin}/kinroute/v1/families?family={conversation}"
        found: list[dict[str, Any]] = httpx.get(url, timeout=WAIT_S).json()["conversations"]
        return found


def own(conversation: str, parent: str | None = None) -> dict[str, str]:
    headers = {"X-Kinroute-Conversation-ID": conversation}
    return headers if parent is None else headers | {"X-Kinroute-Parent-ID": parent}


def request(text: str, number: int, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A right request of its own id."""
    members = struct_pb2.Struct()
    members.update(extra or {})
    given: dict[str, Any] = {
        "request_id": f"attack-{number}",
        "model": "tiny",
        "prompt": text,
        "stopping": generation_pb2.StoppingOptions(max_tokens=2),
        "extra": members,
    }
    return generation_pb2.GenerateRequest(**(given | fields))


@contextmanager
def attacked_system(folder: Path, callers: Sequence[Caller]) -> Iterator[Attacked]:
    model = make_tiny_model(folder / "tiny")
    with System(folder / "system", model) as system:
        add_callers(system.keyring.path, callers)
        context = system.start_worker("context", role="context", kv_cache_config=CACHE)
        cache = {"tokens_per_block": 4, "max_tokens": 8_192}
        generation = system.start_worker("generation", role="generation", kv_cache_config=cache)
        listen = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "admin": "127.0.0.1:0"}
        edge = system.start_edge("edge", [context], [generation], listen=listen)
        system.wait_ready(context, generation, edge)
        with grpc.insecure_channel(edge.grpc) as channel:
            yield Attacked(system, context, generation, edge, channel)
