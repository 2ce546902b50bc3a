"""A request's options from the wire to the worker's own words; each refusal names the field."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from google.protobuf import json_format, struct_pb2

from enginelink import generate_rules as rules
from enginelink import retention
from enginelink.retention import MAX_DURATION_MS, MAX_PRIORITY, MAX_RANGES, Retention, RetentionError, TokenRange
from enginelink.v1 import link_pb2
from openengine.v1 import generation_pb2 as wire
from worker.core.types import Sampling, Stopping
from worker.refusal import invalid, refusing


def sampling_from(message: wire.SamplingParams, response: wire.ResponseOptions) -> Sampling:
    """Raises Refused. Absent values are the protocol's defaults: temperature 1, everything else off."""
    with refusing():
        rules.require_sampling(message)
        logprobs = rules.logprobs_of(response)
    return Sampling(
        temperature=_number(message, "temperature", 1.0),
        top_p=_number(message, "top_p", 1.0),
        top_k=max(0, message.top_k),
        min_p=message.min_p,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=_number(message, "repetition_penalty", 1.0),
        seed=message.seed if message.HasField("seed") else None,
        logprobs=-1 if logprobs is None else logprobs,
    )


def stopping_from(message: wire.StoppingOptions, *, room: int, eos_token_ids: Collection[int]) -> Stopping:
    """Raises Refused. `room`: how many tokens fit behind the prompt; `max_tokens` never exceeds it."""
    with refusing():
        rules.require_stopping(message)
    stops = set(rules.stop_token_ids(message))
    if not message.ignore_eos:
        stops.update(eos_token_ids)
    max_tokens = min(room, message.max_tokens) if message.HasField("max_tokens") else room
    return Stopping(
        max_tokens=max_tokens, min_tokens=min(message.min_tokens, max_tokens), stop_token_ids=frozenset(stops)
    )


def retention_from(message: link_pb2.Retention) -> Retention:
    """Raises Refused."""
    if len(message.ranges) > MAX_RANGES:
        raise invalid(f"retention.ranges has {len(message.ranges)} entries: at most {MAX_RANGES}")
    ranges = []
    for at, one in enumerate(message.ranges):
        path = f"retention.ranges[{at}]"
        stop = one.stop if one.HasField("stop") else None
        if stop is not None and stop <= one.start:
            raise invalid(f"{path}.stop is {stop}: above its start, {one.start}")
        _require_at_most(f"{path}.priority", one.priority, MAX_PRIORITY)
        _require_at_most(f"{path}.duration_ms", one.duration_ms, MAX_DURATION_MS)
        ranges.append(TokenRange(one.start, stop, one.priority, one.duration_ms))
    decode = message.decode_priority if message.HasField("decode_priority") else retention.DEFAULT_PRIORITY
    _require_at_most("retention.decode_priority", decode, MAX_PRIORITY)
    _require_at_most("retention.decode_duration_ms", message.decode_duration_ms, MAX_DURATION_MS)
    return Retention(tuple(ranges), decode, message.decode_duration_ms)


def retention_from_extra(extra: struct_pb2.Struct) -> Retention | None:
    """Raises Refused."""
    if retention.FIELD not in extra.fields:
        return None
    path = f"extra.{retention.FIELD}"
    try:
        asked: Any = json_format.MessageToDict(extra.fields[retention.FIELD])
    except (json_format.Error, ValueError) as error:
        raise invalid(f"{path}: {error}") from error
    if asked is None:
        return None
    try:
        return retention.read_retention(asked, path)
    except RetentionError as error:
        raise invalid(str(error)) from error


def _require_at_most(path: str, value: int, most: int) -> None:
    if value > most:
        raise invalid(f"{path} is {value}: 0 to {most}")


def _number(message: wire.SamplingParams, name: str, default: float) -> float:
    return float(getattr(message, name)) if message.HasField(name) else default
