"""Who may call: every method of our services is entered here.

A caller is known, and its share of open calls taken, before a byte of its message is read, so strangers cost little
and nobody can leave a thousand calls open that say nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from edge.core.admission import Admission
from edge.core.errors import Code, EdgeError
from edge.core.types import Principal, Scope
from edge.grpc.errors import invalid, retry_metadata, status_of
from edge.http.limit_headers import limit_headers
from edge.identity import NO_SCOPE, Identified, Identities
from edge.settings import Limits
from enginelink.openengine_metadata import MetadataError, RequestMetadata, read_metadata

Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
Pairs: TypeAlias = Sequence[tuple[str, str | bytes]]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Caller:
    """`pairs`: the metadata as it came. `metadata`: what OpenEngine's own keys say."""

    identified: Identified
    metadata: RequestMetadata
    pairs: Pairs

    @property
    def principal(self) -> Principal:
        return self.identified.principal

    @property
    def tenant(self) -> str:
        return self.identified.principal.tenant

    def require_operator(self, what: str) -> None:
        """Raises EdgeError FORBIDDEN."""
        if not self.principal.may(Scope.OPERATOR):
            raise EdgeError(Code.FORBIDDEN, f"{what}: this key lacks the scope operator.", reason=NO_SCOPE)


class Call:
    """One call on its way: one message in, any number out."""

    def __init__(self, caller: Caller, context: Context, request: Any, deadline_s: float) -> None:
        self.caller = caller
        self.context = context
        self._request = request
        self._deadline_s = deadline_s

    async def message(self) -> Any:
        """The request. Raises EdgeError: it did not come in time, or cannot be read."""
        try:
            async with asyncio.timeout(self._deadline_s):
                data: object = await self.context.read()
        except TimeoutError:
            raise EdgeError(Code.TIMED_OUT, "The request did not come in time.") from None
        if self.context.cancelled():
            raise asyncio.CancelledError
        if not isinstance(data, bytes):
            raise invalid("The call ended without its request.")
        try:
            return self._request.FromString(data)
        except DecodeError:
            raise invalid(f"The request is no {self._request.DESCRIPTOR.full_name}.") from None

    async def begin(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Send the initial metadata."""
        await self.context.send_initial_metadata(tuple(pairs))

    async def write(self, response: Any) -> None:
        await self.context.write(response.SerializeToString())


Method: TypeAlias = Callable[[Call], Awaitable[None]]


class Door:
    """Turns methods into gRPC's handlers. What they raise becomes a status; EdgeError says which."""

    def __init__(self, identities: Identities, admission: Admission, limits: Limits) -> None:
        self._identities = identities
        self._admission = admission
        self._limits = limits
        self._open: Counter[str] = Counter()

    def handler(
        self, service: ServiceDescriptor, methods: Mapping[str, Method]
    ) -> grpc.GenericRpcHandler[bytes, bytes]:
        """`methods`: by name, all of the service's."""
        handlers = {
            method.name: self._entry(GetMessageClass(method.input_type), methods[method.name])
            for method in service.methods
        }
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _entry(self, request: Any, method: Method) -> grpc.RpcMethodHandler[bytes, bytes]:
        """As a call whose both sides stream, since gRPC enters no other before its message came."""

        async def enter(_: object, context: Context) -> None:
            pairs: Pairs = tuple(context.invocation_metadata() or ())
            known: list[Principal] = []
            try:
                await self._enter(pairs, known, context, request, method)
            except EdgeError as error:
                failure = error
                if error.reason == NO_SCOPE:
                    self._identities.refused("control", error, known[0])
            except Exception:
                log.exception("a call failed by our own fault", method=request.DESCRIPTOR.full_name)
                failure = EdgeError(Code.INTERNAL, "Something went wrong here.")
            else:
                return
            trailing = retry_metadata(failure) + [pair for principal in known for pair in self.limits_of(principal)]
            code, details = status_of(failure)
            await context.abort(code, details, tuple(trailing))

        return grpc.stream_stream_rpc_method_handler(enter)

    async def _enter(
        self, pairs: Pairs, known: list[Principal], context: Context, request: Any, method: Method
    ) -> None:
        identified = await self._identities.identify((name, value) for name, value in pairs if isinstance(value, str))
        known.append(identified.principal)
        try:
            metadata = read_metadata(pairs)
        except MetadataError as error:
            raise invalid(str(error)) from error
        with self._opened(identified.principal.tenant):
            await method(Call(Caller(identified, metadata, pairs), context, request, self._limits.body_timeout_s))

    @contextmanager
    def _opened(self, tenant: str) -> Iterator[None]:
        limit = self._limits.tenant_requests
        if self._open[tenant] >= limit:
            raise EdgeError(
                Code.RATE_LIMITED,
                f"This tenant is at its limit of {limit} calls at a time.",
                retryable=True,
                retry_after_s=1.0,
            )
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    def limits_of(self, principal: Principal) -> list[tuple[str, str]]:
        """Where its tenant stands, as metadata."""
        standing = self._admission.standing(principal, time.monotonic())
        return [(name.decode(), value.decode()) for name, value in limit_headers(standing)]
