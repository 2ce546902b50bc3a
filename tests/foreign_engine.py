"""An OpenEngine engine that is none of ours, from the protocol's table alone, on a real socket.

It answers letters that follow from the length of what it has read, and keeps what was sent to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from openengine.v1 import generation_pb2 as gen
from openengine.v1 import kv_pb2, lifecycle_pb2, model_pb2, server_pb2, service_pb2_grpc

MODEL = "fake"
UNKNOWN_FIELD = b"\xd8\x06\x07"
"""Field 107, a varint: what a later release may say."""


def letter(length: int) -> int:
    """What follows `length` tokens."""
    return 97 + length % 26


def answer_of(prompt_tokens: int, tokens: int) -> list[int]:
    return [letter(prompt_tokens + at) for at in range(tokens)]


@dataclass
class ForeignEngine:
    """What it says of itself, and what it got. `attributes`: in its references beside the first token."""

    role: int = server_pb2.ENGINE_ROLE_AGGREGATED
    backend: str = "nixl"
    revision: int = 1
    minimum_revision: int = 1
    release: str = "v0.1.0"
    health: int = lifecycle_pb2.HEALTH_STATE_READY
    logprobs: bool = False
    salts: bool = True
    bypasses: bool = False
    takes_hints: bool = False
    reason: int = gen.FINISH_REASON_LENGTH
    error_code: int = 0
    port: int = 9
    attributes: dict[str, Any] = field(default_factory=dict)
    step_s: float = 0.0
    requests: list[gen.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    given: list[bytes] = field(default_factory=list)
    got: list[bytes] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address. It runs in threads of its own."""
        with ThreadPoolExecutor(8) as threads:
            self.server = grpc.server(threads)
            service_pb2_grpc.add_ControlServicer_to_server(_Control(self), self.server)
            generate = grpc.unary_stream_rpc_method_handler(self._generate)
            self.server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler("openengine.v1.Inference", {"Generate": generate}),)
            )
            port = self.server.add_insecure_port("127.0.0.1:0")
            self.server.start()
            try:
                yield f"127.0.0.1:{port}"
            finally:
                self.vanish()

    def vanish(self) -> None:
        self.server.stop(None).wait(5.0)

    def _generate(self, encoded: bytes, context: Any) -> Iterator[bytes]:
        request = gen.GenerateRequest.FromString(encoded)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        prompt, most = len(request.token_ids.ids), request.stopping.max_tokens
        usage = gen.Usage(prompt_tokens=prompt, completion_tokens=most, total_tokens=prompt + most)
        if self.error_code:
            last = gen.GenerateResponse(usage=usage)
            last.error.code, last.error.message = self.error_code, "something of its own"  # type: ignore[assignment]
            yield last.SerializeToString()
            return
        if request.extra.fields["request_type"].string_value == "context_only":
            session = self._reference(letter(prompt))
            self.given.append(session)
            yield _field(4, _field(1, session)) + gen.GenerateResponse(usage=usage).SerializeToString()
            return
        if request.kv.HasField("session"):
            self.got.append(_session_in(encoded))
        for token in answer_of(prompt, most):
            time.sleep(self.step_s)
            out = gen.TokenOutput(output_index=0, tokens=[gen.TokenInfo(token_id=token)])
            yield gen.GenerateResponse(token=out).SerializeToString()
        last = gen.GenerateResponse(usage=usage)
        last.finished.output_index, last.finished.reason = 0, self.reason  # type: ignore[assignment]
        yield last.SerializeToString()

    def _reference(self, first_token: int) -> bytes:
        """Not as protobuf's own code would write it: fields in another order, and one that nobody knows."""
        attributes = kv_pb2.KvSessionRef(dp_rank=0)
        attributes.attributes_struct.update({"first_gen_tokens": [first_token], **self.attributes})
        endpoint = kv_pb2.KvSessionRef(endpoints=[kv_pb2.KvEndpoint(host="192.0.2.9", port=self.port, protocol="x")])
        named = kv_pb2.KvSessionRef(session_id="7", transfer_backend=self.backend)
        parts = (attributes, endpoint, named)
        return b"".join(part.SerializeToString() for part in parts) + UNKNOWN_FIELD


class _Control(service_pb2_grpc.ControlServicer):  # type: ignore[misc]  # generated code is untyped
    def __init__(self, engine: ForeignEngine) -> None:
        self._engine = engine

    def Health(self, request: Any, context: Any) -> lifecycle_pb2.HealthResponse:
        return lifecycle_pb2.HealthResponse(state=self._engine.health)  # type: ignore[arg-type]

    def GetServerInfo(self, request: Any, context: Any) -> server_pb2.ServerInfo:
        engine = self._engine
        info = server_pb2.ServerInfo(
            engine_name="another",
            engine_role=engine.role,  # type: ignore[arg-type]
            instance_id="start-1",
            schema_revision=engine.revision,
            minimum_client_revision=engine.minimum_revision,
            schema_release=engine.release,
        )
        if engine.backend:
            connector = info.kv_connector
            connector.enabled, connector.transfer_backend = True, engine.backend
            connector.supports_remote_prefill = engine.role != server_pb2.ENGINE_ROLE_PREFILL
            connector.supports_decode_pull = engine.role != server_pb2.ENGINE_ROLE_DECODE
        if engine.takes_hints:
            info.extra.update({"trtllm_supports_subagent_affinity": True})
        return info

    def GetModelInfo(self, request: Any, context: Any) -> model_pb2.ModelInfo:
        engine = self._engine
        info = model_pb2.ModelInfo(model_id="m", served_model_name=request.model, max_context_length=1000)
        info.generation.supports_cache_salt = engine.salts
        info.generation.supports_prefix_cache_bypass = engine.bypasses
        if engine.logprobs:
            info.generation.output_logprobs.supported = True
            info.generation.output_logprobs.max_top_n = 5
            info.generation.output_logprobs.candidate_selection_modes.append(
                model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N
            )
        return info

    def Abort(self, request: Any, context: Any) -> lifecycle_pb2.AbortResponse:
        self._engine.aborted.append(request.kv_session.session_id)
        return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ABORTED)

    def GetLoad(self, request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")

    def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of less than 128 bytes, or of less than 16,384."""
    length = len(content)
    size = bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
    return bytes([number << 3 | 2]) + size + content


def _session_in(encoded: bytes) -> bytes:
    """`kv.session` of a request that ends with it, as it came."""
    session = gen.GenerateRequest.FromString(encoded).kv.session
    at = encoded.rindex(UNKNOWN_FIELD) + len(UNKNOWN_FIELD)
    assert at == len(encoded)
    start = next(start for start in range(at) if _is_reference(encoded[start:at], session))
    return encoded[start:at]


def _is_reference(encoded: bytes, session: kv_pb2.KvSessionRef) -> bool:
    try:
        return kv_pb2.KvSessionRef.FromString(encoded) == session
    except Exception:  # noqa: BLE001 - any bytes are tried
        return False
