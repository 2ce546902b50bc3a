"""Clients of a worker's gRPC services, as tests need them: synchronous, with deadlines."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import struct_pb2

from enginelink.v1 import link_pb2, link_pb2_grpc
from openengine.v1 import generation_pb2, kv_pb2, service_pb2_grpc
from tests.worker.running import MODEL_NAME

DEADLINE_S = 60.0
_request_ids = count(1)


def generate_request(prompt: Sequence[int] | str, max_tokens: int = 4, **fields: Any) -> generation_pb2.GenerateRequest:
    """Greedy, without end tokens. `extra` is a dict; `kv` and others replace what stands here."""
    extra = struct_pb2.Struct()
    extra.update(fields.pop("extra", {}))
    given: dict[str, Any] = {
        "request_id": f"test-{next(_request_ids)}",
        "model": MODEL_NAME,
        "sampling": generation_pb2.SamplingParams(temperature=0.0),
        "stopping": generation_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        "extra": extra,
    }
    if isinstance(prompt, str):
        given["prompt"] = prompt
    else:
        given["token_ids"] = generation_pb2.TokenIds(ids=prompt)
    return generation_pb2.GenerateRequest(**(given | fields))


@dataclass
class OpenEngine:
    """Both services of one worker."""

    address: str

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address)
        self.inference = service_pb2_grpc.InferenceStub(self.channel)
        self.control = service_pb2_grpc.ControlStub(self.channel)

    def __enter__(self) -> OpenEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def generate(
        self, request: generation_pb2.GenerateRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> Iterator[generation_pb2.GenerateResponse]:
        responses: Iterator[generation_pb2.GenerateResponse] = self.inference.Generate(
            request, timeout=DEADLINE_S, metadata=metadata
        )
        return responses

    def answer(self, request: generation_pb2.GenerateRequest) -> list[generation_pb2.GenerateResponse]:
        return list(self.generate(request))


def token_ids(responses: Sequence[generation_pb2.GenerateResponse]) -> list[int]:
    return [info.token_id for response in responses for info in response.token.tokens]


@dataclass
class Edge:
    """One EngineLink. `events` of each handle in order; column tokens become TokenInfo events."""

    address: str
    envelope: str = ""
    _out: queue.SimpleQueue[link_pb2.EdgeMessage | None] = field(default_factory=queue.SimpleQueue)
    _handles: Iterator[int] = field(default_factory=lambda: count(1))

    def __enter__(self) -> Edge:
        self.channel = grpc.insecure_channel(self.address)
        self._out.put(link_pb2.EdgeMessage(hello=link_pb2.Hello(revision=1, edge_id="test", envelope=self.envelope)))
        self._call = link_pb2_grpc.EngineLinkStub(self.channel).Connect(iter(self._out.get, None), timeout=DEADLINE_S)
        self.welcome = next(self._call).welcome
        return self

    def __exit__(self, *_: object) -> None:
        self._out.put(None)
        self._call.cancel()
        self.channel.close()

    def submit(self, prompt: Sequence[int], phase: link_pb2.Phase, max_tokens: int = 4, **fields: Any) -> int:
        handle = next(self._handles)
        given: dict[str, Any] = {
            "handle": handle,
            "request_id": f"link-{next(_request_ids)}",
            "model": MODEL_NAME,
            "phase": phase,
            "token_ids": np.array(prompt, "<u4").tobytes(),
            "sampling": generation_pb2.SamplingParams(temperature=0.0),
            "stopping": generation_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        }
        self._out.put(link_pb2.EdgeMessage(submits=[link_pb2.Submit(**(given | fields))]))
        return handle

    def cancel(self, handle: int) -> None:
        self._out.put(link_pb2.EdgeMessage(cancels=[link_pb2.Cancel(handle=handle)]))

    def tell(self, conversation: str, **update: Any) -> None:
        """`update`: generating, ended, closed or returned."""
        told = link_pb2.ConversationUpdate(conversation_id=conversation, **update)
        self._out.put(link_pb2.EdgeMessage(updates=[told]))

    def subscribe(self, epoch: str = "", after: int = 0, *, snapshot: bool = False) -> None:
        asked = link_pb2.KvSubscribe(epoch=epoch, after_sequence=after, snapshot=snapshot)
        self._out.put(link_pb2.EdgeMessage(kv_subscribe=asked))

    def kv_events(self) -> Iterator[link_pb2.KvEvents]:
        """Steps that come between them are lost."""
        for message in self._call:
            if message.HasField("kv_events"):
                yield message.kv_events

    def steps(self) -> Iterator[link_pb2.Step]:
        for message in self._call:
            yield message.step

    def events(self, handle: int, last: Sequence[str] = ("finished", "error")) -> list[link_pb2.Event]:
        """Those of `handle`, up to and with the first of a kind in `last`. Others' are lost."""
        found: list[link_pb2.Event] = []
        for step in self.steps():
            for own, token in zip(
                np.frombuffer(step.handles, "<u4"), np.frombuffer(step.token_ids, "<u4"), strict=True
            ):
                if own == handle:
                    found.append(link_pb2.Event(handle=handle, token=generation_pb2.TokenInfo(token_id=int(token))))
            found += [event for event in step.events if event.handle == handle]
            if found and found[-1].WhichOneof("event") in last:
                return found
        raise AssertionError(f"the link ended after {found}")


def kinds(events: Sequence[link_pb2.Event]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def link_tokens(events: Sequence[link_pb2.Event]) -> list[int]:
    return [event.token.token_id for event in events if event.WhichOneof("event") == "token"]


def status_of(caught: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, str]:
    """The status and message of a failed call."""
    call: Any = caught.value
    return call.code(), call.details()


def until(condition: Any, deadline_s: float = 10.0) -> None:
    """Wait until `condition()` is true."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)


def session_of(responses: Sequence[generation_pb2.GenerateResponse]) -> kv_pb2.KvSessionRef:
    assert responses[-1].WhichOneof("event") == "prefill_ready", responses[-1]
    return responses[-1].prefill_ready.kv_session
