"""The fields of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge.http.fields import Fields, invalid, wrong_type
from edge.http.params import MAX_TOKENS, AnswerOptions, Bounds, Defaults, read_options, token_ids

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
MAX_PROMPT_TOKENS = 4_194_304

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Each prompt is text or token ids; each is answered `options.choices` times."""

    model: str
    prompts: tuple[Prompt, ...]
    options: AnswerOptions


def read_completion(body: Mapping[str, Any], defaults: Defaults, bounds: Bounds) -> CompletionRequest:
    """Raises EdgeError naming the field."""
    fields = Fields(body)
    model = fields.text("model")
    if not model:
        raise invalid("model", "You must provide a model parameter.")
    if fields.flag("echo"):
        raise invalid("echo", "'echo' is not supported: the prompt is never part of the answer.")
    fields.refuse("suffix", "text cannot be inserted.")
    options = read_options(
        fields,
        defaults,
        bounds,
        max_tokens=fields.integer("max_tokens", 1, MAX_TOKENS) or DEFAULT_MAX_TOKENS,
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
    )
    best_of = fields.integer("best_of", 1, MAX_TOKENS)
    if best_of is not None and best_of != options.choices:
        raise invalid("best_of", f"'best_of' is not supported, except as the same as 'n', {options.choices}.")
    return CompletionRequest(model, _prompts(fields, bounds), options)


def _prompts(fields: Fields, bounds: Bounds) -> tuple[Prompt, ...]:
    value = fields.get("prompt")
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        raise wrong_type("prompt", "a string, an array of strings, token ids, or an array of token ids", value)
    if not value:
        raise invalid("prompt", "'prompt' must not be empty.")
    if type(value[0]) is int:
        return (_ids(value, "prompt"),)
    if len(value) > bounds.prompts:
        raise invalid(
            "prompt", f"Invalid 'prompt': at most {bounds.prompts} prompts are allowed, but got {len(value)}."
        )
    return tuple(_one(item, f"prompt[{at}]") for at, item in enumerate(value))


def _one(item: Any, param: str) -> Prompt:
    if type(item) is str:
        return item
    if type(item) is list:
        return _ids(item, param)
    raise wrong_type(param, "a string or an array of token ids", item)


def _ids(items: list[Any], param: str) -> tuple[int, ...]:
    if not items:
        raise invalid(param, f"'{param}' must not be empty.")
    if len(items) > MAX_PROMPT_TOKENS:
        raise invalid(param, f"Invalid '{param}': at most {MAX_PROMPT_TOKENS} token ids are allowed.")
    return token_ids(items, param)
