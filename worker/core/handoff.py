"""What a context worker says of its pages, and a generation worker reads: a KvSessionRef. Pure.

Attributes under TensorRT-LLM's names, and ours in `kinroute`:

    disagg_request_id first_gen_tokens ctx_dp_rank ctx_usage schedule_style ctx_info_endpoint
    kinroute: secret host_key instance_id prompt_tokens head_starts, the members of KvShape, and proof where it has one

A Struct's numbers are doubles, so integers that may exceed 2^53 travel as decimal strings. What is read is whatever a
caller sent: nothing is believed before `SessionRef.read` has checked it, and no page moves without the secret.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from openengine.v1 import kv_pb2

BACKEND = "kinroute"
PROTOCOL = "kinroute-tcp"
SCHEDULE_STYLE = "context_first"
MAX_BYTES = 4096
MAX_EXACT = 2**53
MAX_DEPTH = 8
MAX_TOKEN_ID = 2**31 - 1
SESSION_ID = re.compile(r"[0-9a-f]{32}")
SECRET = re.compile(r"[0-9a-f]{64}")
DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")


class HandoffError(ValueError):
    """Raised when a session reference is not one that this worker can use; says which part is wrong, and no secret."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What both sides of a handoff must have in common. `num_kv_heads` counts the whole model's."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: str

    def differs_from(self, other: KvShape) -> str | None:
        """The first difference as a sentence; None where there is none."""
        for name in KvShape.__slots__:
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{name} is {there} at the source and {here} here"
        return None


@dataclass(frozen=True, slots=True)
class KvSource:
    """One context rank: where it serves its pages, and its KV heads [head_start, head_stop)."""

    host: str
    port: int
    head_start: int
    head_stop: int

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SessionRef:
    """A finished prefill whose pages wait to be pulled.

    `session_id`: 32 hex digits; `secret`: 64, known to nobody but the holders of this reference. `host_key`: equal for
    processes that can share memory, empty where the source shares none. `sources` in rank order; together they hold
    every KV head once. `proof`: that a worker of this fleet made it; empty where there are no keys.
    """

    session_id: str
    secret: str = field(repr=False)
    instance_id: str
    host_key: str
    request_id: int
    first_token: int
    prompt_tokens: int
    cached_prompt_tokens: int
    shape: KvShape
    sources: tuple[KvSource, ...]
    proof: str = field(default="", repr=False)

    @property
    def num_blocks(self) -> int:
        return -(-self.prompt_tokens // self.shape.tokens_per_block)

    def encode(self) -> bytes:
        """The same bytes for equal references. Raises HandoffError where they would be more than MAX_BYTES."""
        encoded: bytes = self.to_message().SerializeToString(deterministic=True)
        if len(encoded) > MAX_BYTES:
            raise HandoffError(f"the session reference has {len(encoded)} bytes, more than {MAX_BYTES}")
        return encoded

    def to_message(self) -> kv_pb2.KvSessionRef:
        shape = self.shape
        attributes = struct_pb2.Struct()
        attributes.update(
            {
                "disagg_request_id": str(self.request_id),
                "first_gen_tokens": [self.first_token],
                "ctx_dp_rank": 0,
                "ctx_usage": {"prompt_tokens": self.prompt_tokens, "cached_prompt_tokens": self.cached_prompt_tokens},
                "schedule_style": SCHEDULE_STYLE,
                "ctx_info_endpoint": [source.address for source in self.sources],
                "kinroute": {
                    "secret": self.secret,
                    "host_key": self.host_key,
                    "instance_id": self.instance_id,
                    "prompt_tokens": self.prompt_tokens,
                    "tokens_per_block": shape.tokens_per_block,
                    "num_layers": shape.num_layers,
                    "num_kv_heads": shape.num_kv_heads,
                    "head_dim": shape.head_dim,
                    "dtype": shape.dtype,
                    "head_starts": [source.head_start for source in self.sources] + [shape.num_kv_heads],
                    **({"proof": self.proof} if self.proof else {}),
                },
            }
        )
        return kv_pb2.KvSessionRef(
            session_id=self.session_id,
            transfer_backend=BACKEND,
            endpoints=[
                kv_pb2.KvEndpoint(host=source.host, port=source.port, protocol=PROTOCOL) for source in self.sources
            ],
            dp_rank=0,
            attributes_struct=attributes,
        )

    @classmethod
    def parse(cls, encoded: bytes) -> Self:
        """Raises HandoffError."""
        if len(encoded) > MAX_BYTES:
            raise HandoffError(f"a session reference of {len(encoded)} bytes, more than {MAX_BYTES}")
        try:
            return cls.read(kv_pb2.KvSessionRef.FromString(encoded))
        except DecodeError as error:
            raise HandoffError("the session reference is no KvSessionRef") from error

    @classmethod
    def read(cls, message: kv_pb2.KvSessionRef) -> Self:
        """Unknown attributes are ignored. Raises HandoffError."""
        if message.ByteSize() > MAX_BYTES:
            raise HandoffError(f"a session reference of {message.ByteSize()} bytes, more than {MAX_BYTES}")
        if message.transfer_backend != BACKEND:
            raise HandoffError(f"transfer_backend is {message.transfer_backend!r}: only {BACKEND!r} is understood")
        if not SESSION_ID.fullmatch(message.session_id):
            raise HandoffError("session_id must be 32 lower-case hex digits")
        if message.dp_rank != 0:
            raise HandoffError(f"dp_rank is {message.dp_rank}: workers have data-parallel rank 0 alone")
        attributes = _Attributes("attributes_struct", _plain(message.attributes_struct, MAX_DEPTH))
        ours = attributes.section("kinroute")
        usage = attributes.section("ctx_usage")
        shape = KvShape(
            num_layers=ours.integer("num_layers", 1),
            num_kv_heads=ours.integer("num_kv_heads", 1),
            head_dim=ours.integer("head_dim", 1),
            tokens_per_block=ours.integer("tokens_per_block", 1),
            dtype=ours.text("dtype"),
        )
        prompt_tokens = ours.integer("prompt_tokens", 1)
        cached_tokens = usage.integer("cached_prompt_tokens", 0)
        if usage.integer("prompt_tokens", 1) != prompt_tokens or cached_tokens > prompt_tokens:
            raise HandoffError("ctx_usage contradicts kinroute.prompt_tokens")
        first_tokens = attributes.integers("first_gen_tokens", 0)
        if len(first_tokens) != 1 or first_tokens[0] > MAX_TOKEN_ID:
            raise HandoffError("first_gen_tokens must hold the id of one token")
        return cls(
            session_id=message.session_id,
            secret=ours.text("secret", SECRET),
            instance_id=ours.text("instance_id"),
            host_key=ours.text("host_key"),
            request_id=int(attributes.text("disagg_request_id", DECIMAL)),
            first_token=first_tokens[0],
            prompt_tokens=prompt_tokens,
            cached_prompt_tokens=cached_tokens,
            shape=shape,
            sources=_sources(message.endpoints, ours.integers("head_starts", 0), shape.num_kv_heads),
            proof=ours.text("proof") if "proof" in ours.members else "",
        )


def _sources(
    endpoints: Sequence[kv_pb2.KvEndpoint], head_starts: Sequence[int], num_kv_heads: int
) -> tuple[KvSource, ...]:
    for endpoint in endpoints:
        if not endpoint.host or not 1 <= endpoint.port <= 65535:
            raise HandoffError("an endpoint lacks its host or a port of 1 to 65535")
        if endpoint.protocol != PROTOCOL:
            raise HandoffError(f"an endpoint's protocol is {endpoint.protocol!r}: only {PROTOCOL!r} is understood")
    ranges = list(itertools.pairwise(head_starts))
    if not ranges or head_starts[0] != 0 or head_starts[-1] != num_kv_heads or any(a >= b for a, b in ranges):
        raise HandoffError(f"kinroute.head_starts must rise from 0 to the {num_kv_heads} KV heads")
    if len(ranges) != len(endpoints):
        raise HandoffError(f"{len(endpoints)} endpoints, and head_starts for {len(ranges)} ranks")
    return tuple(
        KvSource(endpoint.host, endpoint.port, start, stop)
        for endpoint, (start, stop) in zip(endpoints, ranges, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Attributes:
    """Reads members of a Struct by name and type; raises HandoffError naming the member."""

    name: str
    members: Mapping[str, Any]

    def section(self, name: str) -> _Attributes:
        value = self.members.get(name)
        if not isinstance(value, dict):
            raise HandoffError(f"{self.name}.{name} must be an object")
        return _Attributes(f"{self.name}.{name}", value)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        value = self.members.get(name)
        if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
            raise HandoffError(f"{self.name}.{name} is not what it must be")
        return value

    def integer(self, name: str, least: int) -> int:
        return self._integer(name, self.members.get(name), least)

    def integers(self, name: str, least: int) -> list[int]:
        values = self.members.get(name)
        if not isinstance(values, list):
            raise HandoffError(f"{self.name}.{name} must be a list")
        return [self._integer(name, value, least) for value in values]

    def _integer(self, name: str, value: object, least: int) -> int:
        if not isinstance(value, float) or not value.is_integer() or not least <= value <= MAX_EXACT:
            raise HandoffError(f"{self.name}.{name} must be an integer of at least {least}")
        return int(value)


def _plain(struct: struct_pb2.Struct, depth: int) -> dict[str, Any]:
    """A Struct as Python's own types. Raises HandoffError where a number is not finite, or it nests too deep."""
    return {name: _plain_value(value, depth) for name, value in struct.fields.items()}


def _plain_value(value: struct_pb2.Value, depth: int) -> Any:
    if depth == 0:
        raise HandoffError("attributes_struct nests too deep")
    match value.WhichOneof("kind"):
        case "struct_value":
            return _plain(value.struct_value, depth - 1)
        case "list_value":
            return [_plain_value(item, depth - 1) for item in value.list_value.values]
        case "number_value":
            if not math.isfinite(value.number_value):
                raise HandoffError("attributes_struct holds a number that is not finite")
            return value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None
