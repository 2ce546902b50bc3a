"""A request's body: bounded, uncompressed, and JSON of bounded depth."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import orjson

from edge.core.errors import Code, EdgeError
from edge.http.asgi import Receive, Scope
from edge.tokenizing.threads import TurnThreads
from enginelink.turns import within_share

MAX_DEPTH = 64
MAX_MARKS = 2_097_152
"""Commas and opening brackets of a body, which bound the objects that parsing makes; a million token ids fit."""


MANY_MARKS = 50_000
"""A body with more takes some ten milliseconds or more to parse."""
REST = 4
MAX_WAITING_BYTES = 134_217_728
"""Of such bodies, which wait in memory."""


class ClientGone(Exception):
    """Raised when the caller went away before its request was whole."""


class RequestBody:
    """A body that may have to be refused before it is read. `is_whole`: nothing of it is left in the connection."""

    def __init__(self, scope: Scope, receive: Receive, limit: int) -> None:
        self._scope = scope
        self._receive = receive
        self._limit = limit
        self.is_whole = False

    async def read(self) -> bytes:
        """All of it, at most `limit` bytes. Raises EdgeError before reading more than that, or ClientGone."""
        if _announced_length(self._scope) > self._limit:
            raise _too_large(self._limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            self.is_whole = not message.get("more_body", False)
            if size > self._limit:
                raise _too_large(self._limit)
            chunks.append(chunk)
            if self.is_whole:
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class BodyParser:
    """`parse_object`, but of bodies with many values one after the other: tenants take turns, and between two of them
    everybody else is served for `REST` times as long, since nothing is while one is parsed."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._turns = TurnThreads(1)
        self._free_s = 0.0
        self._waiting: Counter[str] = Counter()

    async def parse(self, tenant: str, body: bytes) -> dict[str, Any]:
        """Raises EdgeError: INVALID, or OVERLOADED where too much waits already."""
        if len(body) < MANY_MARKS or _marks(body) < MANY_MARKS:
            return parse_object(body)
        if not within_share(self._waiting[tenant], self._max_waiting_bytes - self._waiting.total()):
            raise EdgeError(
                Code.OVERLOADED, "Too many large requests wait to be read.", retryable=True, retry_after_s=1.0
            )
        self._waiting[tenant] += len(body)
        try:
            return await self._turns.run(tenant.encode(errors="surrogatepass"), len(body), lambda: self._parse(body))
        finally:
            self._waiting[tenant] -= len(body)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def close(self) -> None:
        self._turns.close()

    def _parse(self, body: bytes) -> dict[str, Any]:
        """On the thread."""
        time.sleep(max(0.0, self._free_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            return parse_object(body)
        finally:
            now_s = time.monotonic()
            self._free_s = now_s + REST * (now_s - began_s)


def _marks(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b",")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises EdgeError (INVALID)."""
    if _marks(body) > MAX_MARKS:
        raise EdgeError(Code.INVALID, f"The body holds more than {MAX_MARKS} values.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EdgeError(Code.INVALID, f"The body is not valid JSON: {error}.") from None
    if type(value) is not dict:
        raise EdgeError(Code.INVALID, "The body must be a JSON object.")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _require_depth(value)
    return value


def _require_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise EdgeError(Code.INVALID, f"The body is nested more than {MAX_DEPTH} levels deep.")


def _too_large(limit: int) -> EdgeError:
    return EdgeError(Code.BODY_TOO_LARGE, f"The body is over the limit of {limit} bytes.")


def _announced_length(scope: Scope) -> int:
    """The announced length, 0 if there is none. Raises EdgeError for a body that would not be JSON as it stands."""
    length = 0
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) < 19 else 10**18
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise EdgeError(
                Code.UNSUPPORTED_MEDIA_TYPE, "The body must not be compressed: send it without Content-Encoding."
            )
        elif name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if kind != b"application/json" and not kind.endswith(b"+json"):
                raise EdgeError(
                    Code.UNSUPPORTED_MEDIA_TYPE, "The body must be JSON: send Content-Type: application/json."
                )
    return length
