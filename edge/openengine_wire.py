"""A leg as an OpenEngine call: its request, and what a context leg's reference says."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from edge.core.capabilities import OURS, Capabilities
from edge.legs import REQUEST_TYPES, LegOrder
from edge.raw_messages import with_session
from edge.wire import response_message, sampling_message, stopping_message
from enginelink import retention
from openengine.v1 import generation_pb2, kv_pb2

MAX_TOKEN_ID = (1 << 32) - 1


def generate_call(order: LegOrder, can: Capabilities) -> bytes:
    """The serialized request, with the reference exactly as it came."""
    encoded: bytes = generate_request(order, can).SerializeToString()
    return with_session(encoded, order.kv_session) if order.kv_session else encoded


def generate_request(order: LegOrder, can: Capabilities = OURS) -> generation_pb2.GenerateRequest:
    """Without its reference. An engine that keeps no prefix caches apart leaves its own alone, where it can."""
    extra = struct_pb2.Struct()
    extra.update({"request_type": REQUEST_TYPES[order.phase], "conversation_id": order.lineage.conversation})
    if order.retention is not None:
        extra.update({retention.FIELD: retention.write_retention(order.retention)})
    # OpenEngine counts from this leg's own first token.
    stops = replace(
        order.stops,
        max_tokens=order.stops.max_tokens - order.resumed_tokens,
        min_tokens=max(0, order.stops.min_tokens - order.resumed_tokens),
    )
    bypasses = order.bypass_prefix_cache or (can.bypasses and not can.salts)
    return generation_pb2.GenerateRequest(
        request_id=order.request_id,
        model=order.model,
        token_ids=generation_pb2.TokenIds(ids=memoryview(order.token_ids).cast("I")),
        sampling=sampling_message(order.sampling),
        stopping=stopping_message(stops),
        response=response_message(order.sampling),
        kv=generation_pb2.KvOptions(
            cache_salt=order.cache_salt if can.salts else None, bypass_prefix_cache=bypasses or None
        ),
        extra=extra,
    )


def first_token_of(session: kv_pb2.KvSessionRef) -> int | None:
    """The token that the context leg sampled; None where the reference does not hold exactly one."""
    values = session.attributes_struct.fields["first_gen_tokens"].list_value.values
    if len(values) != 1 or values[0].WhichOneof("kind") != "number_value":
        return None
    number = values[0].number_value
    return int(number) if number.is_integer() and 0 <= number <= MAX_TOKEN_ID else None


def read_session(kv_session: bytes) -> kv_pb2.KvSessionRef | None:
    """None where the bytes are no reference."""
    try:
        return kv_pb2.KvSessionRef.FromString(kv_session)
    except DecodeError:
        return None
