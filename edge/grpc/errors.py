"""EdgeError as a gRPC status, before a request is accepted, and as OpenEngine's EngineError after that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from edge.core.errors import Code, EdgeError
from enginelink.generate_rules import NotServed
from openengine.v1 import error_pb2

MAX_DETAILS = 1_000
STATUS: dict[Code, grpc.StatusCode] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    Code.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    Code.BODY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNPROCESSABLE: grpc.StatusCode.INVALID_ARGUMENT,
    Code.NOT_IMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.OVERLOADED: grpc.StatusCode.UNAVAILABLE,
    Code.WORKER_FAILED: grpc.StatusCode.UNAVAILABLE,
    Code.KV_SESSION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.KV_TRANSFER_FAILED: grpc.StatusCode.UNAVAILABLE,
    Code.TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
}
"""Any other is INTERNAL."""
EVENTS: dict[Code, error_pb2.ErrorCode] = {
    Code.INVALID: error_pb2.ERROR_CODE_INVALID_ARGUMENT,
    Code.CONTEXT_LENGTH_EXCEEDED: error_pb2.ERROR_CODE_INVALID_ARGUMENT,
    Code.NOT_IMPLEMENTED: error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    Code.MODEL_NOT_FOUND: error_pb2.ERROR_CODE_MODEL_NOT_FOUND,
    Code.RATE_LIMITED: error_pb2.ERROR_CODE_OVERLOADED,
    Code.OVERLOADED: error_pb2.ERROR_CODE_OVERLOADED,
    Code.KV_SESSION_NOT_FOUND: error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND,
    Code.KV_TRANSFER_FAILED: error_pb2.ERROR_CODE_KV_TRANSFER_FAILED,
    Code.CANCELLED: error_pb2.ERROR_CODE_CANCELLED,
}
"""Any other is INTERNAL."""
REFUSALS = frozenset(
    {
        Code.INVALID,
        Code.CONTEXT_LENGTH_EXCEEDED,
        Code.NOT_IMPLEMENTED,
        Code.MODEL_NOT_FOUND,
        Code.RATE_LIMITED,
        Code.OVERLOADED,
        Code.KV_SESSION_NOT_FOUND,
    }
)
"""How a worker, or placement, turns a request away before anything of it began: it was never accepted."""


def event_of(error: EdgeError) -> error_pb2.EngineError:
    code = EVENTS.get(error.code, error_pb2.ERROR_CODE_INTERNAL)
    return error_pb2.EngineError(code=code, message=error.message, retryable=error.retryable)


def status_of(error: EdgeError) -> tuple[grpc.StatusCode, str]:
    return STATUS.get(error.code, grpc.StatusCode.INTERNAL), error.message[:MAX_DETAILS]


def retry_metadata(error: EdgeError) -> list[tuple[str, str]]:
    """When to come again, in whole seconds, as HTTP says it."""
    return [] if error.retry_after_s is None else [("retry-after", str(max(1, math.ceil(error.retry_after_s))))]


def invalid(message: str, *, reason: str = "") -> EdgeError:
    return EdgeError(Code.INVALID, message, reason=reason)


def unsupported(message: str) -> EdgeError:
    return EdgeError(Code.NOT_IMPLEMENTED, message)


@contextmanager
def refusing() -> Iterator[None]:
    """What the rules of the protocol do not allow is refused."""
    try:
        yield
    except NotServed as error:
        raise (unsupported if error.is_unsupported else invalid)(str(error)) from error
