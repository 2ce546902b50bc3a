"""The edge's errors, one table to each protocol.

EdgeError
 ├─ the caller's fault     INVALID … NOT_IMPLEMENTED
 ├─ capacity               RATE_LIMITED, OVERLOADED
 └─ a worker's fault       WORKER_FAILED … TIMED_OUT, INTERNAL
"""

from __future__ import annotations

import enum


class Code(enum.StrEnum):
    INVALID = "invalid_request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    DUPLICATE = "duplicate_request"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    UNPROCESSABLE = "unprocessable"
    NOT_IMPLEMENTED = "not_implemented"
    RATE_LIMITED = "rate_limit_exceeded"
    OVERLOADED = "overloaded"
    WORKER_FAILED = "worker_failed"
    KV_SESSION_NOT_FOUND = "kv_session_not_found"
    KV_TRANSFER_FAILED = "kv_transfer_failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    INTERNAL = "internal_error"


HTTP_STATUS: dict[Code, int] = {
    Code.INVALID: 400,
    Code.UNAUTHENTICATED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.MODEL_NOT_FOUND: 404,
    Code.DUPLICATE: 409,
    Code.METHOD_NOT_ALLOWED: 405,
    Code.CONTEXT_LENGTH_EXCEEDED: 400,
    Code.BODY_TOO_LARGE: 413,
    Code.UNSUPPORTED_MEDIA_TYPE: 415,
    Code.UNPROCESSABLE: 422,
    Code.NOT_IMPLEMENTED: 501,
    Code.RATE_LIMITED: 429,
    Code.OVERLOADED: 503,
    Code.WORKER_FAILED: 503,
    Code.KV_SESSION_NOT_FOUND: 503,
    Code.KV_TRANSFER_FAILED: 503,
    Code.TIMED_OUT: 504,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
}


class EdgeError(Exception):
    """Raised when a request cannot be served; the caller sees `code`, `message` and `param` and nothing else.

    `reason`: a word or three of our own for the audit log. `retryable`: the same request may succeed later, unchanged;
    then `retry_after_s` may say when.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.reason = reason or code.value

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]
