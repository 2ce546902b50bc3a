"""uvicorn's HTTP protocol with the deadlines that it lacks: callers that send or read a byte a second are cut off."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from edge.core.errors import Code, EdgeError
from edge.http.asgi import ABORT, CERTIFIED
from edge.http.errors import openai_error

BAD_REQUEST = 400
REQUEST_TIMEOUT = 408
HEADERS_TOO_LARGE = 431
MAX_UNWANTED_BYTES = 1_048_576
"""Of a body that still comes when its request was answered."""


@dataclass(frozen=True, slots=True)
class Guards:
    """What a connection may cost. Times are seconds; a body gets one more for each `body_bytes_per_s` that came."""

    connections: int = 16_384
    header_bytes: int = 65_536
    header_s: float = 10.0
    body_s: float = 20.0
    body_bytes_per_s: int = 65_536
    stalled_s: float = 60.0


class GuardedProtocol(HttpToolsProtocol):
    """One connection. At most one timer runs on what the caller sends (headers, then body), one on what it reads.

    Between requests uvicorn's own keep-alive timer runs instead.
    """

    guards = Guards()

    def __init__(
        self,
        config: Any,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0
        self._body_began_s = 0.0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.guards.connections:
            transport.abort()
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.guards.header_bytes:
                self._refuse(HEADERS_TOO_LARGE, f"The headers are over {self.guards.header_bytes} bytes.")
        elif self._reading is None and not self._is_answering:
            # Something came between requests that begins none; uvicorn has stopped its keep-alive timer for it.
            self._await_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {ABORT: self.transport.abort}
        if self.transport.get_extra_info("peercert"):
            extensions[CERTIFIED] = {}
        cast("dict[str, Any]", self.scope)["extensions"] = extensions
        self._in_headers = True
        self._header_bytes = 0
        if self._reading is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_reading_timer()
        self._body_began_s = self.loop.time()
        self._body_bytes = 0
        self._reading = self.loop.call_later(self.guards.body_s, self._body_is_late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)
        if self._body_bytes > MAX_UNWANTED_BYTES and self.cycle.response_complete:
            self.transport.abort()

    def on_message_complete(self) -> None:
        self._stop_reading_timer()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.guards.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_writing_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BAD_REQUEST, msg)

    @property
    def _is_answering(self) -> bool:
        """A request that was read whole, or one before it, is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        self._reading = self.loop.call_later(self.guards.header_s, self._headers_are_late)

    def _headers_are_late(self) -> None:
        self._reading = None
        if self._is_answering:
            self._await_headers()
        elif self._in_headers:
            self._refuse(REQUEST_TIMEOUT, f"The headers took over {self.guards.header_s:g} seconds.")
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        allowed_s = self.guards.body_s + self._body_bytes / self.guards.body_bytes_per_s
        rest_s = self._body_began_s + allowed_s - self.loop.time()
        if self.pipeline:
            # It waits behind another request's answer, unread.
            rest_s = self.guards.body_s
        if rest_s > 0.0:
            self._reading = self.loop.call_later(rest_s, self._body_is_late)
            return
        self._reading = None
        self._refuse(REQUEST_TIMEOUT, "The body came too slowly.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, which sees the caller leave; end the connection."""
        self._stop_reading_timer()
        if self.transport.is_closing():
            return
        if self.pipeline or (self.cycle is not None and self.cycle.response_started and self._is_answering):
            # Another answer is under way: this one would land in the middle of it.
            self.transport.abort()
            return
        body = openai_error(EdgeError(Code.INVALID, message))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def protocol_with(guards: Guards) -> type[GuardedProtocol]:
    """The protocol class of one listener."""
    return cast("type[GuardedProtocol]", type("ListenerProtocol", (GuardedProtocol,), {"guards": guards}))
