"""A small OpenEngine client: token ids in, token ids out, one call per leg."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import grpc
from google.protobuf import struct_pb2

from openengine.v1 import generation_pb2 as gen
from openengine.v1 import kv_pb2, service_pb2_grpc

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer, and when each of its tokens arrived, in seconds after the request was sent."""

    token_ids: list[int]
    arrived_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.arrived_s[0]

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the tokens behind the first."""
        return (len(self.arrived_s) - 1) / (self.arrived_s[-1] - self.arrived_s[0])


class Engine:
    """One worker. Thread-safe: several answers may be asked for at once."""

    def __init__(self, address: str, model: str) -> None:
        self._model = model
        self._stub = service_pb2_grpc.InferenceStub(grpc.insecure_channel(address))
        self._name = secrets.token_hex(4)
        self._ids = count(1)

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        return self.timed_answer(prompt, tokens).token_ids

    def timed_answer(self, prompt: list[int], tokens: int, *, bypass_prefix_cache: bool = False) -> Timed:
        """Greedy, exactly `tokens` tokens."""
        began_s = time.perf_counter()
        timed = Timed([], [])
        for response in self._generate("context_and_generation", prompt, tokens, bypass=bypass_prefix_cache):
            for info in response.token.tokens:
                timed.token_ids.append(info.token_id)
                timed.arrived_s.append(time.perf_counter() - began_s)
        return timed

    def prefill(self, prompt: list[int], tokens: int) -> kv_pb2.KvSessionRef:
        """A context leg; returns the reference that a generation leg takes."""
        last = list(self._generate("context_only", prompt, tokens))[-1]
        assert last.WhichOneof("event") == "prefill_ready", last
        return last.prefill_ready.kv_session

    def decode(self, prompt: list[int], tokens: int, session: kv_pb2.KvSessionRef) -> list[int]:
        """A generation leg; the whole answer, its first token included."""
        responses = list(self._generate("generation_only", prompt, tokens, session))
        assert responses[-1].WhichOneof("event") == "finished", responses[-1]
        return [info.token_id for response in responses for info in response.token.tokens]

    def _generate(
        self,
        phase: str,
        prompt: list[int],
        tokens: int,
        session: kv_pb2.KvSessionRef | None = None,
        *,
        bypass: bool = False,
    ) -> Iterator[gen.GenerateResponse]:
        extra = struct_pb2.Struct()
        extra.update({"request_type": phase})
        request = gen.GenerateRequest(
            request_id=f"{self._name}-{next(self._ids)}",
            model=self._model,
            token_ids=gen.TokenIds(ids=prompt),
            sampling=gen.SamplingParams(temperature=0.0),
            stopping=gen.StoppingOptions(max_tokens=tokens, ignore_eos=True),
            kv=gen.KvOptions(session=session, bypass_prefix_cache=bypass),
            extra=extra,
        )
        yield from self._stub.Generate(request, timeout=DEADLINE_S)
