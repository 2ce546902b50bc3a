"""ASGI's shapes, and the small things that every plain ASGI route does."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

ABORT = "kinroute.abort"
"""Key of `scope["extensions"]`: a callable that ends the connection at once, without flushing it."""

CERTIFIED = "kinroute.certified"
"""Key of `scope["extensions"]` where the caller has shown a certificate that `tls.client_ca_file` vouches for."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def raw_headers(scope: Scope) -> Iterator[tuple[str, str]]:
    """All of them, read as Latin-1."""
    for name, value in scope["headers"]:
        yield name.decode("latin-1"), value.decode("latin-1")


def request_id(scope: Scope) -> bytes:
    """The caller's X-Request-ID where it is short and plain, else a new one. Safe in a header and in a log line."""
    given = header(scope, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return b"req_" + os.urandom(16).hex().encode()


async def respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole response; `content-length` is added."""
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def abort(scope: Scope) -> None:
    """End the connection at once, where the server can."""
    call = scope.get("extensions", {}).get(ABORT)
    if call is not None:
        call()
