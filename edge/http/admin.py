"""The admin listener, as a plain ASGI application.

GET /live  /ready  /health  /metrics
GET /kinroute/v1/workers     every worker as this edge knows it
GET /kinroute/v1/requests    the last requests with their route receipts, newest first
GET /kinroute/v1/leaks       what is held; nothing must be when nothing runs
GET /kinroute/v1/recording   traffic as it ends, without its texts (`edge.http.recording`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from edge.core.admission import Admission
from edge.core.errors import EdgeError
from edge.driver import Driver
from edge.http.asgi import CERTIFIED, Receive, Scope, Send, raw_headers, respond
from edge.http.recent import RecentRequests
from edge.http.recording import PATH as RECORDING
from edge.http.recording import RecordingStream
from edge.identity import Identities
from edge.recordings import Recordings
from edge.telemetry import Metrics

TEXT = b"text/plain; charset=utf-8"
PROBES = ("/live", "/ready", "/health", "/metrics")
_Reply = tuple[int, bytes, bytes]


class Admin:
    """`operators`: who may call what is no probe, beside callers with a certificate; None: whoever reaches it."""

    def __init__(
        self,
        driver: Driver,
        admission: Admission,
        recent: RecentRequests,
        metrics: Metrics,
        recordings: Recordings,
        operators: Identities | None = None,
    ) -> None:
        self._recording = RecordingStream(recordings)
        self._operators = operators
        self._driver = driver
        self._admission = admission
        self._recent = recent
        self._metrics = metrics
        self._pages: Mapping[str, Callable[[], _Reply]] = {
            "/live": lambda: (200, TEXT, b"live"),
            "/health": lambda: (200, TEXT, b"live"),
            "/ready": self._ready,
            "/metrics": lambda: (200, CONTENT_TYPE_PLAIN_0_0_4.encode(), generate_latest(self._metrics.registry)),
            "/kinroute/v1/workers": lambda: _json(200, {"workers": self._workers()}),
            "/kinroute/v1/requests": lambda: _json(200, {"requests": self._recent.listing()}),
            "/kinroute/v1/leaks": lambda: _json(200, self._leaks()),
            RECORDING: lambda: (200, b"application/x-ndjson", b""),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        refusal = await self._refusal(scope)
        if refusal is None and path == RECORDING and method == "GET":
            await self._recording(scope, receive, send)
            return
        status, kind, body = refusal or self._pages[path]()
        await respond(send, status, [(b"content-type", kind)], b"" if method == "HEAD" else body)

    async def _refusal(self, scope: Scope) -> _Reply | None:
        method, path = scope["method"], scope["path"]
        if path not in self._pages:
            return _json(404, {"error": f"no {path[:200]} here"})
        if method not in ("GET", "HEAD"):
            return _json(405, {"error": f"{path} answers GET"})
        if path not in PROBES and self._operators is not None and CERTIFIED not in scope.get("extensions", {}):
            try:
                await self._operators.require_operator(raw_headers(scope))
            except EdgeError as error:
                return _json(error.status, {"error": error.message})
        return None

    def _ready(self) -> _Reply:
        return (200, TEXT, b"ready") if self._driver.model_ready else (503, TEXT, b"not ready")

    def _workers(self) -> list[dict[str, Any]]:
        return [
            {**dataclasses.asdict(worker), "role": worker.role.name, "load": worker.load}
            for worker in self._driver.fleet.workers.values()
        ]

    def _leaks(self) -> dict[str, int]:
        return {
            "requests": self._admission.in_flight,
            "turns": len(self._driver.running),
            "legs": sum(worker.in_flight for worker in self._driver.fleet.workers.values()),
        }


def _json(status: int, value: dict[str, Any]) -> _Reply:
    """Sets are told as sorted lists."""
    return status, b"application/json", orjson.dumps(value, default=sorted)
