"""What of OpenEngine's GenerateRequest is served, the same by edges and workers. Pure.

Each check raises NotServed, which names the field. What passes is honoured; nothing but unknown `extra` is ignored.
"""

from __future__ import annotations

import math

from google.protobuf import struct_pb2

from openengine.v1 import generation_pb2 as wire

MAX_ID_BYTES = 256
MAX_STOP_CONDITIONS = 64
MAX_STOP_TEXT_CHARS = 1_024
MAX_TOP_LOGPROBS = 20
REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 1e6),
}


class NotServed(ValueError):
    """Raised when a request may not be served. `is_unsupported`: what it asks for is not built; else it is invalid."""

    def __init__(self, message: str, *, is_unsupported: bool = False) -> None:
        super().__init__(message)
        self.is_unsupported = is_unsupported


def require_request(message: wire.GenerateRequest) -> None:
    """The fields of the request itself, but its model and input."""
    if not message.request_id or len(message.request_id.encode()) > MAX_ID_BYTES:
        raise NotServed(f"request_id must have 1 to {MAX_ID_BYTES} bytes")
    if message.HasField("guided"):
        raise _unsupported("guided: guided decoding is not served")
    if message.media:
        raise _unsupported("media: this model reads text alone")
    if message.lora_name:
        raise _unsupported("lora_name: LoRA adapters are not served")


def require_sampling(message: wire.SamplingParams, *, max_sequences: int = 1) -> None:
    if message.HasField("num_sequences") and not 1 <= message.num_sequences <= max_sequences:
        served = "only 1 is served" if max_sequences == 1 else f"1 to {max_sequences} are served"
        raise _unsupported(f"sampling.num_sequences is {message.num_sequences}: {served}")
    for name, (low, high) in _RANGES.items():
        value = float(getattr(message, name))
        if message.HasField(name) and not (math.isfinite(value) and low <= value <= high):
            raise NotServed(f"sampling.{name} is {value}: between {low} and {high}")
    if message.top_k < -1:
        raise NotServed(f"sampling.top_k is {message.top_k}: at least 1, or 0 for all")
    for name in ("top_p", "repetition_penalty"):
        if message.HasField(name) and getattr(message, name) == 0.0:
            raise NotServed(f"sampling.{name} is 0: must be above it")


def require_stopping(message: wire.StoppingOptions) -> None:
    if len(message.conditions) > MAX_STOP_CONDITIONS:
        raise NotServed(f"stopping.conditions has {len(message.conditions)} entries: at most {MAX_STOP_CONDITIONS}")
    for condition in message.conditions:
        match condition.WhichOneof("condition"):
            case "stop_text" if not condition.stop_text:
                raise NotServed("stopping.conditions has an empty stop_text")
            case "stop_text" if len(condition.stop_text) > MAX_STOP_TEXT_CHARS:
                raise NotServed(f"stopping.conditions has a stop_text of more than {MAX_STOP_TEXT_CHARS} characters")
            case None:
                raise NotServed("stopping.conditions has an entry without a condition")
    if message.include_stop_in_output:
        raise _unsupported("stopping.include_stop_in_output: stop tokens and texts are never part of the output")
    if message.HasField("max_tokens") and message.max_tokens < 1:
        raise NotServed("stopping.max_tokens is 0: at least 1")
    if message.HasField("max_tokens") and message.min_tokens > message.max_tokens:
        raise NotServed(f"stopping.min_tokens is {message.min_tokens}: max_tokens, {message.max_tokens}, is less")


def stop_texts(message: wire.StoppingOptions) -> list[str]:
    return [one.stop_text for one in message.conditions if one.HasField("stop_text")]


def stop_token_ids(message: wire.StoppingOptions) -> list[int]:
    return [one.stop_token_id for one in message.conditions if one.HasField("stop_token_id")]


def logprobs_of(message: wire.ResponseOptions) -> int | None:
    """None: no log probabilities; 0: of the tokens of the answer; n: of the best n beside each too."""
    if message.return_prompt_logprobs:
        raise _unsupported("response.return_prompt_logprobs: log probabilities of the prompt are not computed")
    if message.HasField("prompt_candidates"):
        raise _unsupported("response.prompt_candidates: log probabilities of the prompt are not computed")
    if message.HasField("prompt_logprob_start"):
        raise _unsupported("response.prompt_logprob_start: log probabilities of the prompt are not computed")
    if not message.HasField("output_candidates"):
        return 0 if message.return_output_logprobs else None
    candidates = message.output_candidates
    selection = candidates.WhichOneof("selection")
    if selection != "top_n":
        raise _unsupported(f"response.output_candidates.{selection or 'selection'}: only top_n is served")
    if candidates.top_n > MAX_TOP_LOGPROBS:
        raise NotServed(f"response.output_candidates.top_n is {candidates.top_n}: at most {MAX_TOP_LOGPROBS}")
    return candidates.top_n


def request_type_of(extra: struct_pb2.Struct, *, has_session: bool) -> str:
    """One of REQUEST_TYPES, or nothing where the request leaves it open. A session means generation."""
    asked = text_of(extra, "request_type")
    if asked and asked not in REQUEST_TYPES:
        raise NotServed(f"extra.request_type is {asked[:100]!r}: {', '.join(REQUEST_TYPES)}")
    return "generation_only" if has_session else asked


def text_of(extra: struct_pb2.Struct, name: str) -> str:
    """A member of `extra`, which must be a string; empty where it is absent."""
    if name not in extra.fields:
        return ""
    value = extra.fields[name]
    if value.WhichOneof("kind") != "string_value":
        raise NotServed(f"extra.{name} must be a string")
    return value.string_value


def _unsupported(message: str) -> NotServed:
    return NotServed(message, is_unsupported=True)
