"""Any message of a protocol, from its descriptors, and any bytes in place of one, to any method of a gRPC server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
from google.protobuf import struct_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from openengine.v1 import generation_pb2

CALL_S = 10.0
LISTEN_S = 0.1
"""How long a stream that need not end is listened to."""
MAX_RESPONSES = 3
MAX_DEPTH = 4
FAIR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE,
}
ENDLESS = ("SubscribeKvEvents", "Connect")
"""Methods whose streams may go on for as long as the caller likes."""
Metadata = Sequence[tuple[str, str | bytes]]
_ids = count(1)


def methods_of(*services: Any) -> list[MethodDescriptor]:
    """Every method of these service descriptors."""
    return [method for service in services for method in service.methods]


@dataclass(frozen=True)
class Outcome:
    """How a call ended; `code` None: it was still answering when we had heard enough."""

    code: grpc.StatusCode | None
    details: str
    responses: list[bytes]


def call(channel: Any, method: MethodDescriptor, messages: Iterable[bytes], metadata: Metadata = ()) -> Outcome:
    """Send bytes as they are; a stream is heard for a while at most."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    endless = method.name in ENDLESS
    if method.client_streaming:
        responses: Any = channel.stream_stream(path)(iter(messages), timeout=LISTEN_S, metadata=metadata)
    else:
        responses = channel.unary_stream(path)(
            next(iter(messages)), timeout=LISTEN_S if endless else CALL_S, metadata=metadata
        )
    heard: list[bytes] = []
    try:
        for response in responses:
            heard.append(response)
            if len(heard) == MAX_RESPONSES:
                responses.cancel()
                return Outcome(None, "", heard)
    except grpc.RpcError:
        pass
    code = responses.code()
    if endless and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Outcome(None, "", heard)
    return Outcome(code, str(responses.details()), heard)


def require_fair(method: MethodDescriptor, outcome: Outcome) -> None:
    assert outcome.code is None or outcome.code in FAIR, f"{method.full_name}: {outcome.code}, {outcome.details}"


WORDS = ("", "tiny", "r", "r-1", "context_only", "generation_only", "conversation_id", "true", "\0", "é" * 9, "x" * 300)


def messages(kind: Any, depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages in which each field is absent or anything that its type allows."""
    if kind.full_name == "google.protobuf.Struct":
        return st.dictionaries(st.sampled_from(WORDS), PLAIN, max_size=3).map(_struct)
    fields = {
        field.name: _values(field, depth)
        for field in kind.fields
        if depth < MAX_DEPTH or field.type != FieldDescriptor.TYPE_MESSAGE
    }
    cls: Callable[..., Message] = GetMessageClass(kind)
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: _made(cls, kind, given))


def _made(cls: Callable[..., Message], kind: Any, given: dict[str, Any]) -> Message:
    message = cls(**given)
    if isinstance(message, generation_pb2.GenerateRequest) and message.model and not message.request_id:
        message.request_id = f"dice-{next(_ids)}"
    return message


def _values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    one: st.SearchStrategy[Any]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        return st.dictionaries(st.sampled_from(WORDS), _values(value, depth + 1), max_size=2)
    if field.message_type is not None:
        one = messages(field.message_type, depth + 1)
    elif field.enum_type is not None:
        one = st.sampled_from([value.number for value in field.enum_type.values] + [99])
    else:
        one = SCALARS[field.cpp_type]
        if field.type == FieldDescriptor.TYPE_BYTES:
            one = st.binary(max_size=40)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _struct(given: dict[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(given)
    return struct


PLAIN = st.recursive(
    st.none() | st.booleans() | st.floats(width=32) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2),
    max_leaves=4,
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from((0, 1, 3, -1, 2**31 - 1, -(2**31))),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from((0, 1, 3, -1, 2**63 - 1, -(2**63))),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from((0, 1, 3, 258, 2**31, 2**32 - 1)),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from((0, 1, 3, 2**63, 2**64 - 1)),
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from((0.0, 0.5, 1.0, -1.0, 1e30, float("inf"), float("nan"))),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from((0.0, 0.5, 1.0, -1.0, 1e300, float("inf"), float("nan"))),
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(WORDS) | st.text(max_size=6),
}


def right_request(**changes: Any) -> generation_pb2.GenerateRequest:
    """One that is served, for dice to change."""
    given: dict[str, Any] = {
        "request_id": f"dice-{next(_ids)}",
        "model": "tiny",
        "token_ids": generation_pb2.TokenIds(ids=[1, 2, 3]),
        "stopping": generation_pb2.StoppingOptions(max_tokens=2),
    }
    return generation_pb2.GenerateRequest(**(given | changes))


def changed_requests() -> st.SearchStrategy[generation_pb2.GenerateRequest]:
    """Right requests with something from anywhere put over them."""

    def merge(odd: Any) -> generation_pb2.GenerateRequest:
        request = right_request()
        request.MergeFrom(odd)
        return request

    return messages(generation_pb2.GenerateRequest.DESCRIPTOR).map(merge)


METADATA_NAMES = (
    "authorization", "x-api-key", "openengine-priority", "openengine-request-id", "openengine-target-dp-rank",
    "openengine-deadline", "kinroute-lineage", "x-kinroute-conversation-id", "x-kinroute-parent-id", "traceparent",
    "x-trtllm-subagent-affinity-id", "x-trtllm-subagent-affinity-auth", "x-kinroute-internal-tenant", "odd-bin",
)  # fmt: skip


def metadata() -> st.SearchStrategy[list[tuple[str, str | bytes]]]:
    """Names that mean something, with any value that may travel, some of them twice."""
    texts = st.sampled_from(("", "a", "true", "9", "-1", "sha256=00", "eyJhbGciOiJub25lIn0.e30.", "x" * 300)) | st.text(
        st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=12
    )

    def fit(pairs: list[tuple[str, str]]) -> list[tuple[str, str | bytes]]:
        return [(name, value.encode() if name.endswith("-bin") else value) for name, value in pairs]

    return st.lists(st.tuples(st.sampled_from(METADATA_NAMES), texts), max_size=4).map(fit)
