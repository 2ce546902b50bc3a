"""What every gRPC server of ours offers beside its own services: the standard health service, and reflection.

Neither asks for a key: they tell whether it serves, and a public schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

MAX_WATCHERS = 64
POLL_S = 0.1
FAREWELL_S = 0.05
"""How long those who watch have to hear that it ends."""


_Library: Any = health.aio.HealthServicer  # type: ignore[attr-defined]  # set as the library is imported


class Health(_Library):  # type: ignore[misc]  # the library is untyped
    """Says of the server, and of each of `services`, whether it serves; not before `follow` runs."""

    def __init__(self, services: Sequence[str]) -> None:
        super().__init__()
        self._services = ("", *services)
        self._server_status = dict.fromkeys(self._services, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._watching: set[asyncio.Task[None]] = set()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - gRPC names the method
        """Until the caller leaves, or this server ends: nobody would let it end before."""
        if len(self._watching) >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} calls watch already")
        watching: asyncio.Task[None] = asyncio.ensure_future(super().Watch(request, context))
        self._watching.add(watching)
        try:
            await asyncio.wait((watching,))
        finally:
            watching.cancel()
            self._watching.discard(watching)

    async def follow(self, is_serving: Callable[[], bool]) -> None:
        """Until cancelled; then it serves no more, whatever `is_serving` says."""
        told = False
        try:
            while True:
                now = is_serving()
                if now is not told:
                    told = now
                    await self._tell(told)
                await asyncio.sleep(POLL_S)
        finally:
            await self.enter_graceful_shutdown()
            await asyncio.sleep(FAREWELL_S)
            for watching in self._watching:
                watching.cancel()

    async def _tell(self, serves: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in self._services:
            await self.set(service, status.SERVING if serves else status.NOT_SERVING)


def add_standard_services(server: grpc.aio.Server, services: Sequence[str]) -> Health:
    """Before the server starts. `services`: the full names of its own."""
    standing = Health(services)
    health_pb2_grpc.add_HealthServicer_to_server(standing, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return standing
