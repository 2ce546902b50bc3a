"""The admin listener: probes, metrics and control calls, as a plain ASGI application.

GET  /live  /ready  /metrics
GET  /kinroute/v1/state          what this worker is and how it is
GET  /kinroute/v1/leaks          what is held on every rank; nothing must be when nothing runs
POST /kinroute/v1/cache/clear    forget every prefix that nobody uses
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol, TypeAlias

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class Operated(Protocol):
    """The worker, as its operator sees it."""

    @property
    def registry(self) -> CollectorRegistry: ...
    def is_live(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def state(self) -> dict[str, Any]: ...
    async def leaks(self) -> dict[str, Any]: ...
    async def clear_cache(self) -> dict[str, Any]: ...


class Admin:
    """The ASGI application."""

    def __init__(self, worker: Operated) -> None:
        self._worker = worker

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, kind, body = await self._answer(scope["method"], scope["path"])
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        worker = self._worker
        match "GET" if method == "HEAD" else method, path:
            case "GET", "/live" | "/health":
                return _word(worker.is_live(), "live")
            case "GET", "/ready":
                return _word(worker.is_ready(), "ready")
            case "GET", "/metrics":
                return 200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(worker.registry)
            case "GET", "/kinroute/v1/state":
                return _json(200, worker.state())
            case "GET", "/kinroute/v1/leaks":
                return await _within_deadline(worker.leaks())
            case "POST", "/kinroute/v1/cache/clear":
                return await _within_deadline(worker.clear_cache())
            case _, "/live" | "/health" | "/ready" | "/metrics" | "/kinroute/v1/state" | "/kinroute/v1/leaks":
                return _json(405, {"error": f"{path} answers GET"})
            case _, "/kinroute/v1/cache/clear":
                return _json(405, {"error": f"{path} answers POST"})
        return _json(404, {"error": f"no {path} here"})


CALL_DEADLINE_S = 30.0


async def _within_deadline(call: Awaitable[dict[str, Any]]) -> tuple[int, str, bytes]:
    try:
        async with asyncio.timeout(CALL_DEADLINE_S):
            return _json(200, await call)
    except TimeoutError:
        return _json(503, {"error": f"the engine did not answer in {CALL_DEADLINE_S:.0f} s"})


def _word(yes: bool, word: str) -> tuple[int, str, bytes]:
    return (200, "text/plain", word.encode()) if yes else (503, "text/plain", f"not {word}".encode())


def _json(status: int, value: dict[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(value).encode()


class AdminServer(uvicorn.Server):
    """Serves on a socket that is already bound, and leaves signals to the process that runs it."""

    def __init__(self, application: Admin) -> None:
        super().__init__(
            uvicorn.Config(application, log_config=None, access_log=False, lifespan="off", ws="none", interface="asgi3")
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_on(self, listener: socket.socket) -> None:
        """Until cancelled or told by `should_exit`."""
        await self.serve(sockets=[listener])
