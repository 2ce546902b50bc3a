"""From a parsed request to the turns that the driver runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from edge.core.errors import Code, EdgeError
from edge.core.lineage import Believed
from edge.core.types import Turn, TurnId
from edge.http.asked import Asked
from edge.identity import Identified

SEEDS = 2**63


def make_turns(
    asked: Asked,
    prompts: Sequence[bytes],
    *,
    model: str,
    caller: Identified,
    believed: Believed,
    cache_salt: bytes,
    max_context_length: int,
    param: str,
) -> list[Turn]:
    """`options.choices` turns for each prompt, in order; where a seed was given, each has one of its own, counting up.

    Raises EdgeError (CONTEXT_LENGTH_EXCEEDED, naming `param`) for a prompt that leaves no room for an answer.
    """
    options = asked.options
    turns: list[Turn] = []
    for prompt in prompts:
        room = max_context_length - len(prompt) // 4
        if room < 1:
            raise _too_long(len(prompt) // 4, max_context_length, param)
        stops = options.stop_options(room)
        for _ in range(options.choices):
            sampling = options.sampling
            if sampling.seed is not None:
                sampling = dataclasses.replace(sampling, seed=(sampling.seed + len(turns)) % SEEDS)
            turns.append(
                Turn(
                    turn_id=TurnId(os.urandom(16).hex()),
                    model=model,
                    token_ids=prompt,
                    sampling=sampling,
                    stops=stops,
                    principal=caller.principal,
                    lineage=believed.lineage,
                    cache_salt=cache_salt,
                    tenant_tag=caller.tenant_tag,
                    traceparent=trace(caller.headers, "traceparent"),
                    tracestate=trace(caller.headers, "tracestate"),
                    retention=options.retention,
                )
            )
    return turns


def trace(headers: Mapping[str, str], name: str) -> str:
    """A W3C trace header, if it is one that may be passed on."""
    value = headers.get(name, "")
    return value if len(value) <= 512 and value.isascii() and value.isprintable() else ""


def _too_long(prompt_tokens: int, max_context_length: int, param: str) -> EdgeError:
    return EdgeError(
        Code.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {max_context_length} tokens, and the answer needs at least one of "
        f"them. However, your prompt has {prompt_tokens} tokens. Please shorten it.",
        param=param,
    )
