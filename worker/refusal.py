"""Why a request is not accepted, as every protocol of a worker tells it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import grpc

from enginelink.generate_rules import NotServed
from openengine.v1 import error_pb2

STATUS: dict[int, grpc.StatusCode] = {
    error_pb2.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE: grpc.StatusCode.UNIMPLEMENTED,
    error_pb2.ERROR_CODE_ROLE_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    error_pb2.ERROR_CODE_MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    error_pb2.ERROR_CODE_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    error_pb2.ERROR_CODE_REQUEST_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    error_pb2.ERROR_CODE_DUPLICATE_REQUEST: grpc.StatusCode.ALREADY_EXISTS,
    error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    error_pb2.ERROR_CODE_INTERNAL: grpc.StatusCode.INTERNAL,
}
REFUSED_LINEAGE = ("kinroute-refused", "lineage")


class Refused(Exception):
    """Raised before a request is accepted; `code` is an openengine.v1 ErrorCode, the message names the field.
    `is_lineage`: what came as proof of lineage is refused; without it the request may be served."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        retryable: bool = False,
        status: grpc.StatusCode | None = None,
        is_lineage: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status or STATUS[code]
        self.message = message
        self.retryable = retryable
        self.is_lineage = is_lineage

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with the status: which part of a request it was, where that decides what to do about it."""
        return (REFUSED_LINEAGE,) if self.is_lineage else ()

    @classmethod
    def named(cls, name: str, message: str, *, retryable: bool) -> Self:
        """`name`: the code without its prefix, as the core has it."""
        return cls(error_pb2.ErrorCode.Value(f"ERROR_CODE_{name}"), message, retryable=retryable)

    def event(self) -> error_pb2.EngineError:
        """As EngineLink tells it."""
        return error_pb2.EngineError(
            code=error_pb2.ErrorCode.Name(self.code), message=self.message, retryable=self.retryable
        )


@contextmanager
def refusing() -> Iterator[None]:
    """What the rules of the protocol do not allow is refused."""
    try:
        yield
    except NotServed as error:
        raise (unsupported if error.is_unsupported else invalid)(str(error)) from error


def invalid(message: str) -> Refused:
    return Refused(error_pb2.ERROR_CODE_INVALID_ARGUMENT, message)


def unproven(message: str) -> Refused:
    """A hint of lineage may not be believed."""
    return Refused(error_pb2.ERROR_CODE_INVALID_ARGUMENT, message, is_lineage=True)


def unsupported(message: str) -> Refused:
    return Refused(error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE, message)


def overloaded(message: str) -> Refused:
    return Refused(error_pb2.ERROR_CODE_OVERLOADED, message, retryable=True)


def unavailable(message: str) -> Refused:
    """This worker serves nobody now; another may."""
    return Refused(error_pb2.ERROR_CODE_OVERLOADED, message, retryable=True, status=grpc.StatusCode.UNAVAILABLE)
