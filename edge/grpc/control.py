"""OpenEngine's Control service. A caller sees and ends what is its tenant's; the scope `operator` opens the rest."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from edge.core.errors import Code, EdgeError
from edge.core.seals import Opened, Seals
from edge.grpc.door import Call, Caller, Method
from edge.grpc.errors import invalid, unsupported
from edge.grpc.info import load_info, model_info, server_info
from edge.grpc.kv_events import KvEvents
from edge.grpc.probe import probe
from edge.grpc.requests import Found, Requests
from edge.http.route import Parts
from openengine.v1 import kv_pb2, lifecycle_pb2, model_pb2, server_pb2

ALL_TENANTS = "x-kinroute-all-tenants"
READY, NOT_READY = lifecycle_pb2.HEALTH_STATE_READY, lifecycle_pb2.HEALTH_STATE_NOT_READY


class Control:
    """`methods`: by name, for the door. `instance_id`: of this edge."""

    def __init__(
        self,
        parts: Parts,
        seals: Seals,
        requests: Requests,
        kv_events: KvEvents,
        *,
        instance_id: str,
        version: str,
        takes_signed_hints: bool = False,
    ) -> None:
        self._parts = parts
        self._seals = seals
        self._requests = requests
        self._kv_events = kv_events
        self._instance_id = instance_id
        self._version = version
        self._takes_signed_hints = takes_signed_hints
        self.methods: dict[str, Method] = {
            "GetServerInfo": _unary(self._server_info),
            "GetModelInfo": _unary(self._model_info),
            "GetLoad": _unary(self._load),
            "Health": _unary(self._health),
            "Abort": _unary(self._abort),
            "LoadLora": _unary(_no_lora),
            "UnloadLora": _unary(_no_lora),
            "ListLoras": _unary(_no_lora),
            "GetKvEventSources": _unary(self._kv_event_sources),
            "SubscribeKvEvents": self._subscribe,
        }

    async def _server_info(self, message: server_pb2.GetServerInfoRequest, caller: Caller) -> server_pb2.ServerInfo:
        return server_info(
            self._parts.driver.fleet,
            version=self._version,
            instance_id=self._instance_id,
            models=self._parts.catalogue.names,
            takes_signed_hints=self._takes_signed_hints,
        )

    async def _model_info(self, message: model_pb2.GetModelInfoRequest, caller: Caller) -> model_pb2.ModelInfo:
        if not message.model:
            raise invalid("model is missing")
        return model_info(
            self._parts.catalogue.find(message.model),
            max_context_length=self._parts.driver.max_context_length,
            max_outputs=self._parts.limits.choices,
            bypasses_prefix_cache=self._parts.limits.tenant_bypass_prefix_cache,
        )

    async def _load(self, message: server_pb2.GetLoadRequest, caller: Caller) -> server_pb2.LoadInfo:
        if message.include_per_rank:
            caller.require_operator("include_per_rank")
        driver = self._parts.driver
        return load_info(
            driver.fleet,
            instance_id=self._instance_id,
            kv_sessions=len(driver.pins),
            per_worker=message.include_per_rank,
        )

    async def _health(self, message: lifecycle_pb2.HealthRequest, caller: Caller) -> lifecycle_pb2.HealthResponse:
        """READY only if every check asked for is."""
        driver = self._parts.driver
        response = lifecycle_pb2.HealthResponse()
        response.checks.add(name="grpc", state=READY)
        why = "" if driver.model_ready else "no context or no generation worker is ready"
        response.checks.add(name="scheduler", state=NOT_READY if why else READY, message=why)
        if message.model:
            why = "" if self._parts.catalogue.has(message.model) else "it is not served here"
            response.checks.add(name="model", state=NOT_READY if why else READY, message=why)
        if message.role:
            why = "" if message.role == server_pb2.ENGINE_ROLE_AGGREGATED else "its role is aggregated"
            response.checks.add(name="role", state=NOT_READY if why else READY, message=why)
        if message.include_inference_probe and driver.model_ready:
            why = await probe(self._parts, caller)
            response.checks.add(name="inference_probe", state=NOT_READY if why else READY, message=why)
        good = all(check.state == READY for check in response.checks)
        response.state = READY if good else NOT_READY
        return response

    async def _abort(self, message: lifecycle_pb2.AbortRequest, caller: Caller) -> lifecycle_pb2.AbortResponse:
        status = lifecycle_pb2.ABORT_STATUS_ABORTED
        everybody = self._means_everybody(message, caller)
        match message.WhichOneof("target"):
            case "request_id":
                found = self._requests.abort(caller.tenant, message.request_id)
                if found is Found.UNKNOWN:
                    raise EdgeError(Code.NOT_FOUND, f"request_id {message.request_id[:256]!r} is not known here")
                if found is Found.ENDED:
                    status = lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
            case "kv_session":
                opened = self._opened(message.kv_session, caller)
                if not self._parts.driver.pins.abort((opened.instance_id, message.kv_session.session_id)):
                    raise EdgeError(Code.NOT_FOUND, "kv_session is not held here")
            case "all_requests":
                self._parts.driver.abort(None if everybody else caller.tenant)
            case _:
                raise invalid("target is missing: give exactly one")
        return lifecycle_pb2.AbortResponse(status=status)

    def _opened(self, session: kv_pb2.KvSessionRef, caller: Caller) -> Opened:
        try:
            return self._seals.open(session, tenant=caller.tenant, now_s=time.time())
        except EdgeError as error:
            self._parts.identities.refused("seal", error, caller.principal)
            raise

    @staticmethod
    def _means_everybody(message: lifecycle_pb2.AbortRequest, caller: Caller) -> bool:
        asked = caller.identified.headers.get(ALL_TENANTS)
        if asked is None:
            return False
        if asked != "true" or message.WhichOneof("target") != "all_requests":
            raise invalid(f"{ALL_TENANTS} goes with all_requests, and is true or absent")
        caller.require_operator(ALL_TENANTS)
        return True

    async def _kv_event_sources(
        self, message: kv_pb2.GetKvEventSourcesRequest, caller: Caller
    ) -> kv_pb2.GetKvEventSourcesResponse:
        """None: nothing is published beside this service's own stream."""
        caller.require_operator("GetKvEventSources")
        self._kv_events.require_ranks(message.data_parallel_ranks)
        return kv_pb2.GetKvEventSourcesResponse()

    async def _subscribe(self, call: Call) -> None:
        call.caller.require_operator("SubscribeKvEvents")
        await self._kv_events.serve(await call.message(), call)


def _unary(answer: Callable[[Any, Caller], Awaitable[Any]]) -> Method:
    async def method(call: Call) -> None:
        await call.write(await answer(await call.message(), call.caller))

    return method


async def _no_lora(message: Any, caller: Caller) -> Any:
    raise unsupported("LoRA adapters are not served")
