"""The admin listener: probes, metrics and control calls, as a plain ASGI application.

GET  /live  /ready  /metrics
     /kinroute/v1/...            `worker.admin_calls`
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
from uvicorn.protocols.http.h11_impl import H11Protocol

from configuration.tls import Kept, ServerMaterial, renewing_context
from worker import admin_calls
from worker.admin_calls import Calls

MAX_BODY_BYTES = 64 << 10
BODY_DEADLINE_S = 10.0
CERTIFIED = "kinroute.certified"
"""Key of `scope["extensions"]` where the caller has shown a certificate that `client_ca_file` vouches for."""
PROBES = ("/live", "/health", "/ready", "/metrics")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Reply: TypeAlias = tuple[int, str, bytes]


class Operated(admin_calls.Operated, Protocol):
    """The worker, as its operator and its supervisor see it."""

    @property
    def registry(self) -> CollectorRegistry: ...
    def is_ready(self) -> bool: ...


class Gone(Exception):
    """Raised when a caller left before its call was whole: nothing is done, and nobody hears of it."""


class Admin:
    """The ASGI application. `certified_only`: what is no probe is answered to callers with a certificate alone."""

    def __init__(self, worker: Operated, *, certified_only: bool = False) -> None:
        self._certified_only = certified_only
        self._worker = worker
        self._calls = Calls(worker)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, kind, body = await self._answer(scope, receive)
        except Gone:
            return
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, scope: Message, receive: Receive) -> Reply:
        path: str = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        wanted = "GET" if path in PROBES else self._calls.method_of(path)
        if wanted is None:
            return _json(404, {"error": f"no {path[:200]} here"})
        if method != wanted:
            return _json(405, {"error": f"{path} answers {wanted}"})
        if path in PROBES:
            return self._probe(path)
        if self._certified_only and CERTIFIED not in scope.get("extensions", {}):
            return _json(403, {"error": f"{path} is for callers with a certificate of listen.admin.tls.client_ca_file"})
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                body = await _read(receive)
        except TimeoutError:
            return _json(408, {"error": f"the body did not come in {BODY_DEADLINE_S:.0f} s"})
        if body is None:
            return _json(413, {"error": f"the body has more than {MAX_BODY_BYTES} bytes"})
        return _json(*await self._calls.answer(path, scope["query_string"], body))

    def _probe(self, path: str) -> Reply:
        match path:
            case "/ready":
                return _word(self._worker.is_ready(), "ready")
            case "/metrics":
                return 200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._worker.registry)
        return _word(self._worker.is_live(), "live")


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None: it is too long, and not read to its end. Raises Gone."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        more = message.get("more_body", False)
    return bytes(body)


def _word(yes: bool, word: str) -> Reply:
    return (200, "text/plain", word.encode()) if yes else (503, "text/plain", f"not {word}".encode())


def _json(status: int, value: dict[str, Any]) -> Reply:
    return status, "application/json", json.dumps(value).encode()


class _Protocol(H11Protocol):
    """Tells the application where the caller has shown a certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if transport.get_extra_info("peercert"):
            self.app = _certified(self.app)


def _certified(app: Any) -> Any:
    async def call(scope: Message, receive: Receive, send: Send) -> None:
        await app({**scope, "extensions": {CERTIFIED: {}}}, receive, send)

    return call


class AdminServer(uvicorn.Server):
    """Serves on a socket that is already bound, and leaves signals to the process that runs it."""

    def __init__(self, application: Admin, tls: Kept[ServerMaterial] | None = None) -> None:
        config = uvicorn.Config(
            application,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            interface="asgi3",
        )
        config.load()
        if tls is not None:
            config.ssl = renewing_context(tls, certificate_optional=True)
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_on(self, listener: socket.socket) -> None:
        """Until cancelled or told by `should_exit`."""
        await self.serve(sockets=[listener])
