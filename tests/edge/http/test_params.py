"""Every known field of a chat request has a type and a range; a refusal names it."""

from __future__ import annotations

from typing import Any

import pytest

from edge.core.errors import Code, EdgeError
from edge.http.chat_params import read_chat
from edge.http.params import Bounds, Defaults

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def read(**fields: Any) -> Any:
    return read_chat({"model": "m", "messages": [dict(USER)], **fields}, Defaults(), Bounds(choices=4, messages=8))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER] * 9}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "s"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": 10_000}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a", "b" * 1_000_000]}, "stop[1]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 257}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"kv_cache_retention_config": "high"}, "kv_cache_retention_config"),
        ({"kv_cache_retention_config": {"priority": 101}}, "kv_cache_retention_config.priority"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(EdgeError) as refused:
        read(**fields)

    assert (refused.value.code, refused.value.param) == (Code.INVALID, param)
    assert param.partition("[")[0] in refused.value.message


def test_null_counts_as_absent() -> None:
    names = ("temperature", "top_p", "seed", "n", "stop", "max_tokens", "tools", "tool_choice", "logprobs", "stream")

    assert read(**dict.fromkeys(names)) == read()


def test_the_models_own_settings_stand_in_for_what_is_absent() -> None:
    defaults = Defaults.of({"temperature": 0.6, "top_k": 20, "top_p": "high", "do_sample": True, "min_p": None})

    options = read_chat({"model": "m", "messages": [USER], "top_k": -1}, defaults, Bounds()).options

    assert (options.sampling.temperature, options.sampling.top_k, options.sampling.top_p) == (0.6, 0, 1.0)


def test_a_top_p_of_zero_leaves_the_likeliest_token() -> None:
    assert 0.0 < read(top_p=0).options.sampling.top_p < 1e-6


def test_max_completion_tokens_wins_over_its_old_name() -> None:
    assert read(max_tokens=5, max_completion_tokens=7).options.max_tokens == 7


def test_tokens_are_never_more_than_fit() -> None:
    assert read(max_tokens=100, min_tokens=50).options.stop_options(room=10).max_tokens == 10
    assert read(max_tokens=100, min_tokens=50).options.stop_options(room=10).min_tokens == 10
    assert read().options.stop_options(room=10).max_tokens == 10
