"""The fake engine behind OpenEngine: `Generate`, one stream a request, and the control calls that an edge makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from bench.fake_engine import FakeEngine, columns, first_token
from enginelink.generate_rules import MAX_TOP_LOGPROBS
from enginelink.v1 import link_pb2
from openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2, model_pb2, server_pb2, service_pb2_grpc

HANDLE = 1
REFUSED_LINEAGE = (("kinroute-refused", "lineage"),)
PHASES = {
    "context_only": link_pb2.PHASE_CONTEXT,
    "generation_only": link_pb2.PHASE_GENERATION,
    "context_and_generation": link_pb2.PHASE_AGGREGATED,
}


class FakeControl(service_pb2_grpc.ControlServicer):  # type: ignore[misc]  # generated code is untyped
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def GetServerInfo(self, request: Any, context: Any) -> server_pb2.ServerInfo:
        return server_info(self._engine)

    async def GetModelInfo(self, request: Any, context: Any) -> model_pb2.ModelInfo:
        return model_info(self._engine)

    async def Health(self, request: Any, context: Any) -> lifecycle_pb2.HealthResponse:
        return lifecycle_pb2.HealthResponse(state=lifecycle_pb2.HEALTH_STATE_READY)

    async def GetLoad(self, request: Any, context: Any) -> server_pb2.LoadInfo:
        engine = self._engine
        return server_pb2.LoadInfo(
            instance_id=engine.instance_id, running_requests=engine.running, active_kv_sessions=len(engine.pins)
        )

    async def Abort(self, request: Any, context: Any) -> lifecycle_pb2.AbortResponse:
        session_id = request.kv_session.session_id
        if session_id not in self._engine.pins:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session")
        self._engine.cancel(*self._engine.pins[session_id])
        return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ABORTED)


class FakeInference(service_pb2_grpc.InferenceServicer):  # type: ignore[misc]  # generated code is untyped
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        """A step that is not whole ends the stream before its terminal event."""
        link = self._engine.attach()
        try:
            metadata = dict(context.invocation_metadata() or ())
            self._engine.submit(link, _submit(request, metadata.get("kinroute-lineage", "")))
            is_over = False
            while not is_over:
                step = await link.steps.get()
                if len(step.handles) % 4:
                    return
                if any(event.lineage_refused for event in step.events):
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        "refused by the fake worker",
                        (("kinroute-refused", "lineage"),),
                    )
                for response in self._responses(request, step):
                    await context.write(response)
                    is_over = response.WhichOneof("event") != "token"
        finally:
            self._engine.detach(link, keep_pins=True)

    def _responses(
        self, request: generation_pb2.GenerateRequest, step: link_pb2.Step
    ) -> Iterator[generation_pb2.GenerateResponse]:
        usage = generation_pb2.Usage(
            prompt_tokens=len(request.token_ids.ids), cached_prompt_tokens=self._engine.options.cached_tokens
        )
        for _, token_id in columns(step):
            yield _token(token_id)
        for event in step.events:
            match event.WhichOneof("event"):
                case "kv_arrived":
                    yield _token(first_token(request.kv.session.SerializeToString()))
                case "token":
                    yield _token(event.token.token_id)
                case "prefill_ready":
                    ready = generation_pb2.PrefillReady()
                    ready.kv_session.ParseFromString(event.prefill_ready.kv_session)
                    yield generation_pb2.GenerateResponse(prefill_ready=ready, usage=usage)
                case "finished":
                    finished = generation_pb2.GenerationFinished(output_index=0, reason=event.finished.reason)
                    yield generation_pb2.GenerateResponse(finished=finished, usage=usage)
                case "error":
                    yield generation_pb2.GenerateResponse(error=event.error, usage=usage)


def server_info(engine: FakeEngine) -> server_pb2.ServerInfo:
    info = server_pb2.ServerInfo(
        engine_name="kinroute-fake",
        engine_role=server_pb2.ENGINE_ROLE_AGGREGATED,
        instance_id=engine.instance_id,
        kv_connector=kv_pb2.KvConnectorInfo(
            enabled=True, transfer_backend="fake", supports_remote_prefill=True, supports_decode_pull=True
        ),
        schema_revision=1,
        minimum_client_revision=1,
    )
    if engine.proofs is not None:
        proofs = engine.proofs
        info.extra.update(
            {"kinroute_lineage": True, "fake_parents": proofs.parents, "fake_refused": float(proofs.refused)}
        )
    return info


def model_info(engine: FakeEngine) -> model_pb2.ModelInfo:
    logprobs = model_pb2.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
        max_top_n=MAX_TOP_LOGPROBS,
    )
    return model_pb2.ModelInfo(
        max_context_length=engine.options.max_context_length,
        generation=model_pb2.GenerationCapabilities(
            output_logprobs=logprobs, supports_cache_salt=True, supports_prefix_cache_bypass=True
        ),
    )


def _token(token_id: int) -> generation_pb2.GenerateResponse:
    tokens = [generation_pb2.TokenInfo(token_id=token_id)]
    return generation_pb2.GenerateResponse(token=generation_pb2.TokenOutput(output_index=0, tokens=tokens))


def _submit(request: generation_pb2.GenerateRequest, lineage: str) -> link_pb2.Submit:
    phase = PHASES[request.extra.fields["request_type"].string_value]
    return link_pb2.Submit(
        handle=HANDLE,
        request_id=request.request_id,
        phase=phase,
        token_ids=b"".join(token.to_bytes(4, "little") for token in request.token_ids.ids),
        stopping=request.stopping,
        kv_session=request.kv.session.SerializeToString(),
        lineage=lineage,
    )
