"""What a caller may ask of an answer, the same for chat and plain completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edge.core.types import SamplingOptions, StopOptions
from edge.http.fields import Fields, invalid, wrong_type
from enginelink import retention
from enginelink.retention import DEFAULT_BOUNDS, Retention, RetentionBounds, RetentionError

_Value = TypeVar("_Value", int, float)

MAX_STOPS = 16
MAX_STOP_CHARS = 1_024
MAX_STOP_TOKENS = 16
MAX_TOKENS = 2**31 - 1
SMALLEST_TOP_P = 1e-9
"""What a top_p of 0 becomes: the likeliest token alone."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The operator's limits on one request."""

    choices: int = 16
    prompts: int = 64
    messages: int = 10_000
    retention: RetentionBounds = DEFAULT_BOUNDS


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the model's own generation settings say where the caller says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Defaults:
        """From a generation_config.json; what is absent or no positive number there stays at OpenAI's default."""
        found: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            value = settings.get(name)
            if isinstance(value, int | float) and value > 0:
                found[name] = int(value) if name == "top_k" else float(value)
        return cls(**found)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """`max_tokens` None: as much as the context leaves. `stops` are strings, the edge's own affair. `retention`: within
    the tenant's bounds already."""

    stream: bool
    include_usage: bool
    choices: int
    sampling: SamplingOptions
    stops: tuple[str, ...]
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    retention: Retention | None

    def stop_options(self, room: int) -> StopOptions:
        """`room`: the tokens that fit behind the prompt, at least 1."""
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        return StopOptions(max_tokens, min(self.min_tokens, max_tokens), self.stop_token_ids, self.ignore_eos)


def read_options(
    fields: Fields, defaults: Defaults, bounds: Bounds, *, max_tokens: int | None, logprobs: int | None
) -> AnswerOptions:
    """Raises EdgeError naming the field."""
    stream, include_usage = _streaming(fields)
    _refuse_unsupported(fields)
    max_new = max_tokens or MAX_TOKENS
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    if min_tokens > max_new:
        raise invalid("min_tokens", f"Invalid 'min_tokens': {min_tokens} is more than 'max_tokens', {max_new}.")
    return AnswerOptions(
        stream=stream,
        include_usage=include_usage,
        choices=_or(fields.integer("n", 1, bounds.choices), 1),
        sampling=_sampling(fields, defaults, logprobs),
        stops=_stops(fields),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=token_ids(fields.items("stop_token_ids", MAX_STOP_TOKENS) or [], "stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos") or False,
        retention=_retention(fields, bounds.retention),
    )


def token_ids(items: list[Any], param: str) -> tuple[int, ...]:
    for at, item in enumerate(items):
        if type(item) is not int:
            raise wrong_type(f"{param}[{at}]", "a token id", item)
        if not 0 <= item < 2**32:
            raise invalid(param, f"Invalid '{param}[{at}]': {item} is no token id.")
    return tuple(items)


def _sampling(fields: Fields, defaults: Defaults, logprobs: int | None) -> SamplingOptions:
    top_k = _or(fields.integer("top_k", -1, MAX_TOKENS), defaults.top_k)
    return SamplingOptions(
        temperature=_or(fields.number("temperature", 0.0, 2.0), defaults.temperature),
        top_p=max(SMALLEST_TOP_P, _or(fields.number("top_p", 0.0, 1.0), defaults.top_p)),
        top_k=max(0, top_k),
        min_p=_or(fields.number("min_p", 0.0, 1.0), defaults.min_p),
        frequency_penalty=_or(fields.number("frequency_penalty", -2.0, 2.0), 0.0),
        presence_penalty=_or(fields.number("presence_penalty", -2.0, 2.0), 0.0),
        repetition_penalty=_or(fields.number("repetition_penalty", 0.01, 100.0), defaults.repetition_penalty),
        seed=fields.integer("seed", -(2**63), 2**64 - 1),
        logprobs=logprobs,
    )


def _streaming(fields: Fields) -> tuple[bool, bool]:
    stream = fields.flag("stream") or False
    options = fields.members("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    include_usage = options.get("include_usage")
    if include_usage is not None and type(include_usage) is not bool:
        raise wrong_type("stream_options.include_usage", "a boolean", include_usage)
    return stream, include_usage or False


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if type(value) is str else fields.items("stop", MAX_STOPS) or []
    for at, stop in enumerate(stops):
        param = "stop" if stops is not value else f"stop[{at}]"
        if type(stop) is not str:
            raise wrong_type(param, "a string", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid(param, f"Invalid '{param}': expected 1 to {MAX_STOP_CHARS} characters, but got {len(stop)}.")
    return tuple(stops)


def _retention(fields: Fields, bounds: RetentionBounds) -> Retention | None:
    asked = fields.get(retention.FIELD)
    if asked is None:
        return None
    try:
        return bounds.clamp(retention.read_retention(asked))
    except RetentionError as error:
        raise invalid(error.path, str(error)) from error


def _refuse_unsupported(fields: Fields) -> None:
    shape = fields.members("response_format")
    if shape is not None and shape.get("type") != "text":
        raise invalid("response_format", '\'response_format\' is not supported yet, except {"type": "text"}.')
    fields.refuse("logit_bias", "no token can be favoured yet.")
    fields.refuse("chat_template", "the model's own template is always used.")
    fields.refuse("guided_json", "output is not constrained yet.")
    fields.refuse("guided_regex", "output is not constrained yet.")


def _or(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value
