"""Bytes that are no message are their sender's mistake: INVALID_ARGUMENT, where grpc would say UNKNOWN and log it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

MESSAGE = "what was sent is no message of this call"


class Unreadable:
    """Stands for what could not be read, where a handler reads its messages one by one."""


UNREADABLE: Final = Unreadable()


class UnreadableMessages(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """A handler of a single message is not called for one that cannot be read. One of a stream finds UNREADABLE in it,
    unless it answers as a generator, for which it is refused here too."""

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        changes: dict[str, Any] = {"request_deserializer": _lenient(handler.request_deserializer)}
        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is None:
                continue
            if kind != "stream_stream":
                changes[kind] = _refusing(behaviour)
            elif inspect.isasyncgenfunction(behaviour):
                changes[kind] = _refusing_in(behaviour)
        return handler._replace(**changes)


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return UNREADABLE

    return read


def _refusing(behaviour: Any) -> Any:
    if inspect.isasyncgenfunction(behaviour):

        async def generate(message: Any, context: Any) -> AsyncIterator[Any]:
            await _require(message, context)
            async for response in behaviour(message, context):
                yield response

        return generate

    async def answer(message: Any, context: Any) -> Any:
        await _require(message, context)
        return await behaviour(message, context)

    return answer


def _refusing_in(behaviour: Any) -> Any:
    async def readable(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for message in messages:
            await _require(message, context)
            yield message

    async def generate(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for response in behaviour(readable(messages, context), context):
            yield response

    return generate


async def _require(message: Any, context: Any) -> None:
    if message is UNREADABLE:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MESSAGE)
