"""A request's options from the wire to the worker's own words; each refusal names the field."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from google.protobuf import json_format, struct_pb2

from enginelink import retention
from enginelink.retention import MAX_DURATION_MS, MAX_PRIORITY, MAX_RANGES, Retention, RetentionError, TokenRange
from enginelink.v1 import link_pb2
from openengine.v1 import generation_pb2 as wire
from worker.core.types import Sampling, Stopping
from worker.refusal import invalid, unsupported

MAX_STOP_CONDITIONS = 64
MAX_TOP_LOGPROBS = 20


def sampling_from(message: wire.SamplingParams, response: wire.ResponseOptions) -> Sampling:
    """Raises Refused. Absent values are the protocol's defaults: temperature 1, everything else off."""
    if message.HasField("num_sequences") and message.num_sequences != 1:
        raise unsupported(f"sampling.num_sequences is {message.num_sequences}: only 1 is served")
    sampling = Sampling(
        temperature=_number(message, "temperature", 1.0, 0.0, 1e6),
        top_p=_number(message, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, message.top_k),
        min_p=_number(message, "min_p", 0.0, 0.0, 1.0),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=_number(message, "presence_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_number(message, "repetition_penalty", 1.0, 0.0, 1e6),
        seed=message.seed if message.HasField("seed") else None,
        logprobs=_logprobs(response),
    )
    if message.top_k < -1:
        raise invalid(f"sampling.top_k is {message.top_k}: at least 1, or 0 for all")
    if sampling.top_p == 0.0:
        raise invalid("sampling.top_p is 0: must be above it")
    if sampling.repetition_penalty == 0.0:
        raise invalid("sampling.repetition_penalty is 0: must be above it")
    return sampling


def stopping_from(message: wire.StoppingOptions, *, room: int, eos_token_ids: Collection[int]) -> Stopping:
    """Raises Refused. `room`: how many tokens fit behind the prompt; `max_tokens` never exceeds it."""
    if len(message.conditions) > MAX_STOP_CONDITIONS:
        raise invalid(f"stopping.conditions has {len(message.conditions)} entries: at most {MAX_STOP_CONDITIONS}")
    if message.include_stop_in_output:
        raise unsupported("stopping.include_stop_in_output: stop tokens and texts are never part of the output")
    if message.HasField("max_tokens") and message.max_tokens < 1:
        raise invalid("stopping.max_tokens is 0: at least 1")
    stops = {condition.stop_token_id for condition in message.conditions if condition.HasField("stop_token_id")}
    if not message.ignore_eos:
        stops.update(eos_token_ids)
    max_tokens = min(room, message.max_tokens) if message.HasField("max_tokens") else room
    return Stopping(
        max_tokens=max_tokens, min_tokens=min(message.min_tokens, max_tokens), stop_token_ids=frozenset(stops)
    )


def stop_texts_from(message: wire.StoppingOptions) -> list[str]:
    texts = []
    for condition in message.conditions:
        match condition.WhichOneof("condition"):
            case "stop_text":
                if not condition.stop_text:
                    raise invalid("stopping.conditions has an empty stop_text")
                texts.append(condition.stop_text)
            case None:
                raise invalid("stopping.conditions has an entry without a condition")
    return texts


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


def _logprobs(response: wire.ResponseOptions) -> int:
    if response.return_prompt_logprobs or response.HasField("prompt_candidates"):
        raise unsupported("response.return_prompt_logprobs: log probabilities of the prompt are not computed")
    if not response.HasField("output_candidates"):
        return 0 if response.return_output_logprobs else -1
    candidates = response.output_candidates
    if candidates.WhichOneof("selection") != "top_n":
        raise unsupported("response.output_candidates: only top_n is served")
    if candidates.top_n > MAX_TOP_LOGPROBS:
        raise invalid(f"response.output_candidates.top_n is {candidates.top_n}: at most {MAX_TOP_LOGPROBS}")
    return candidates.top_n


def _number(message: wire.SamplingParams, name: str, default: float, low: float, high: float) -> float:
    if not message.HasField(name):
        return default
    value = float(getattr(message, name))
    if not (math.isfinite(value) and low <= value <= high):
        raise invalid(f"sampling.{name} is {value}: between {low} and {high}")
    return value
