"""EdgeError as the error objects that callers' libraries read."""

from __future__ import annotations

import math

import orjson

from edge.core.errors import Code, EdgeError
from edge.http.asgi import Headers, Receive, Send, respond

LINGER_BYTES = 67_108_864
JSON = (b"content-type", b"application/json")

_TYPES: dict[Code, str] = {
    Code.UNAUTHENTICATED: "authentication_error",
    Code.FORBIDDEN: "permission_error",
    Code.RATE_LIMITED: "rate_limit_error",
    Code.OVERLOADED: "overloaded_error",
    Code.NOT_IMPLEMENTED: "not_implemented_error",
    Code.WORKER_FAILED: "server_error",
    Code.KV_SESSION_NOT_FOUND: "server_error",
    Code.KV_TRANSFER_FAILED: "server_error",
    Code.TIMED_OUT: "server_error",
    Code.CANCELLED: "server_error",
    Code.INTERNAL: "server_error",
}
_CODES: dict[Code, str | None] = {Code.INVALID: None, Code.UNAUTHENTICATED: "invalid_api_key"}
_ANTHROPIC_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error(error: EdgeError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`"""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": _TYPES.get(error.code, "invalid_request_error"),
                "param": error.param,
                "code": _CODES.get(error.code, error.code.value),
            }
        }
    )


def anthropic_error(error: EdgeError, request_id: bytes) -> bytes:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`"""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return orjson.dumps(
        {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id.decode()}
    )


def error_headers(error: EdgeError, request_id: bytes) -> Headers:
    headers = [JSON, (b"x-request-id", request_id)]
    if error.code in (Code.RATE_LIMITED, Code.OVERLOADED) or error.status == 503:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1.0))))
    if error.code is Code.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


async def send_error(send: Send, error: EdgeError, request_id: bytes) -> None:
    await respond(send, error.status, error_headers(error, request_id), openai_error(error))


async def refuse_unread(receive: Receive, send: Send, error: EdgeError, request_id: bytes) -> None:
    """Answer a request whose body was not read, then close.

    The caller is still sending: closing at once would reset the connection and lose the answer with it, so what comes
    is dropped for a while first. The server's own deadline for a body bounds how long.
    """
    body = openai_error(error)
    headers = [*error_headers(error, request_id), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    dropped = 0
    while dropped < LINGER_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            break
    await send({"type": "http.response.body", "body": b""})
