"""What the OpenAPI page says of the hot routes, which FastAPI cannot see, and of the errors that all routes share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edge.core.headers import MAX_ID_BYTES, HeaderNames
from edge.core.lineage_token import MAX_TOKEN_BYTES
from edge.http.chat_params import MAX_TOOLS, MAX_TOP_LOGPROBS, ROLES
from edge.http.completion_params import MAX_LOGPROBS
from edge.http.params import MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, MAX_TOKENS
from enginelink.retention import FIELD as RETENTION

Schema = dict[str, Any]

_REFUSALS = {
    "400": "Something in the request is wrong; `param` names it.",
    "401": "No key, or one that is not known.",
    "403": "The key lacks the scope that a hint takes.",
    "404": "There is no such model.",
    "408": "The headers or the body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is no JSON, or is compressed.",
    "429": "The tenant is at one of its limits.",
    "431": "The headers are too large.",
    "503": "No worker can take the request now, or the edge is full.",
    "504": "The workers took too long.",
}
_COMES_AGAIN = ("429", "503")
SAYS_NOTHING = ("assistant", "function")
"""Roles whose messages need no content: they may be calls alone."""
SAYS_SOMETHING = tuple(role for role in ROLES if role not in SAYS_NOTHING)


def describe(page: Schema) -> None:
    """Add to what FastAPI made: the hot routes, error responses of all, and how callers prove who they are."""
    for name in ("HTTPValidationError", "ValidationError"):
        page.get("components", {}).get("schemas", {}).pop(name, None)
    components = page.setdefault("components", {})
    components.setdefault("schemas", {}).update(_schemas())
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a JWT of a configured issuer."},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, as Anthropic's."},
    }
    paths = page["paths"]
    for path in ("/v1/models", "/v1/models/{name}", "/version"):
        operation = paths[path]["get"]
        operation["security"] = [{"bearer": []}, {"apiKey": []}]
        operation["responses"].pop("422", None)
        operation["responses"] |= _refusals(("401", "404") if "{" in path else ("401",))
    for path in ("/live", "/ready"):
        paths[path]["get"]["responses"] = {"200": _text("Yes.")}
    paths["/ready"]["get"]["responses"]["503"] = _text("No worker is ready.")
    paths["/v1/chat/completions"] = _hot("An answer to a conversation, as OpenAI's Chat Completions.", "Chat")
    paths["/v1/completions"] = _hot("A continuation of a text, as OpenAI's Completions.", "Completion")


def _hot(summary: str, kind: str) -> Schema:
    answer = {
        "description": "The answer; with `stream`, server-sent events, the last of which is `[DONE]` or an error.",
        "headers": {
            "x-request-id": {"schema": {"type": "string"}},
            "x-kinroute-lineage": {"description": "For sub-agents of this conversation.", "schema": {"type": "string"}},
            "x-kinroute-receipt": {"description": "Where it was placed, and why.", "schema": {"type": "string"}},
        },
        "content": {
            "application/json": {"schema": _ref(f"{kind}Answer")},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
    post = {
        "summary": summary,
        "security": [{"bearer": []}, {"apiKey": []}],
        "parameters": _lineage_parameters(),
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(f"{kind}Request")}}},
        "responses": {"200": answer, **_refusals(_REFUSALS)},
    }
    return {"post": post}


def _refusals(statuses: Iterable[str]) -> Schema:
    return {
        status: {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": _ref("Error")}},
            **({"headers": {"retry-after": {"schema": {"type": "integer"}}}} if status in _COMES_AGAIN else {}),
        }
        for status in statuses
    }


def _lineage_parameters() -> list[Schema]:
    """Our own names; an operator may have changed them."""
    names = HeaderNames()
    identifier = {"type": "string", "maxLength": MAX_ID_BYTES}
    return [
        _header(names.conversation, "This conversation.", identifier),
        _header(names.parent, "The conversation that opened it; takes the scope affinity.", identifier),
        _header(names.final, "That this is its last request.", {"type": "string", "enum": ["true", "false"]}),
        _header(names.lineage, "The parent's lineage token.", {"type": "string", "maxLength": MAX_TOKEN_BYTES}),
    ]


def _header(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _schemas() -> Schema:
    return {
        "Error": _object(
            {
                "error": _object(
                    {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                    required=("message", "type", "param", "code"),
                )
            },
            required=("error",),
        ),
        "ChatRequest": _object(
            {
                "messages": {"type": "array", "minItems": 1, "items": _ref("Message")},
                "tools": {"type": ["array", "null"], "maxItems": MAX_TOOLS, "items": _ref("Tool")},
                "tool_choice": {"enum": ["auto", "none", None]},
                "max_completion_tokens": _integer(1, MAX_TOKENS),
                "logprobs": {"type": ["boolean", "null"]},
                "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
                **_common(),
            },
            required=("model", "messages"),
        ),
        "CompletionRequest": _object(
            {"prompt": _prompt(), "logprobs": _integer(0, MAX_LOGPROBS), **_common()}, required=("model", "prompt")
        ),
        "Message": {"anyOf": [_message(SAYS_NOTHING, "null"), _message(SAYS_SOMETHING)]},
        "Tool": _object(
            {
                "type": {"type": "string", "const": "function"},
                "function": _object(
                    {
                        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"]},
                    },
                    required=("name",),
                ),
            },
            required=("type", "function"),
        ),
        "Usage": _object(
            {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
            required=("prompt_tokens", "completion_tokens", "total_tokens"),
        ),
        "ChatAnswer": _answer("chat.completion", {"message": {"type": "object"}}),
        "CompletionAnswer": _answer("text_completion", {"text": {"type": "string"}}),
    }


def _message(roles: tuple[str, ...], *or_content: str) -> Schema:
    """Of these roles; content is text, its parts, or `or_content`."""
    call = _object({"function": {"type": "object"}}, required=("function",))
    return _object(
        {
            "role": {"type": "string", "enum": list(roles)},
            "content": {"type": ["string", "array", *or_content], "items": _part()},
            "tool_calls": {"type": ["array", "null"], "items": call},
        },
        required=("role",) if or_content else ("role", "content"),
    )


def _part() -> Schema:
    return _object({"type": {"const": "text"}, "text": {"type": "string"}}, required=("type", "text"))


def _common() -> Schema:
    """What both hot routes take. Limits of one operator's own (`n`, messages, prompts) are not here."""
    return {
        "model": {"type": "string", "minLength": 1},
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}},
        "n": {"type": ["integer", "null"], "minimum": 1, "description": "At most `limits.choices`."},
        "max_tokens": _integer(1, MAX_TOKENS),
        "min_tokens": _integer(0, MAX_TOKENS),
        "temperature": _number(0.0, 2.0),
        "top_p": _number(0.0, 1.0),
        "top_k": _integer(-1, MAX_TOKENS),
        "min_p": _number(0.0, 1.0),
        "frequency_penalty": _number(-2.0, 2.0),
        "presence_penalty": _number(-2.0, 2.0),
        "repetition_penalty": _number(0.01, 100.0),
        "seed": _integer(-(2**63), 2**64 - 1),
        "stop": {
            "oneOf": [
                _stop(),
                {"type": "array", "maxItems": MAX_STOPS, "items": _stop()},
                {"type": "null"},
            ]
        },
        "stop_token_ids": {"type": ["array", "null"], "maxItems": MAX_STOP_TOKENS, "items": _token_id()},
        "ignore_eos": {"type": ["boolean", "null"]},
        "cache_salt": {"type": ["string", "null"], "description": "Narrows who shares this request's cached prefixes."},
        "prompt_cache_key": {"type": ["string", "null"], "description": "What the request should be near."},
        "conversation_params": {
            "type": ["object", "null"],
            "properties": {"conversation_id": {"type": ["string", "null"], "maxLength": MAX_ID_BYTES}},
        },
        RETENTION: {"type": ["object", "null"], "description": "What the request's blocks are worth keeping."},
    }


def _prompt() -> Schema:
    ids = {"type": "array", "minItems": 1, "items": _token_id()}
    return {
        "anyOf": [
            {"type": "string"},
            ids,
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, ids]}},
        ]
    }


def _answer(kind: str, content: Schema) -> Schema:
    choice = _object(
        {
            "index": {"type": "integer"},
            "finish_reason": {"type": "string"},
            "logprobs": {"type": ["object", "null"]},
            **content,
        },
        required=("index", "finish_reason", *content),
    )
    members = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": choice},
        "usage": _ref("Usage"),
    }
    return _object(members, required=tuple(members))


def _object(properties: Schema, required: tuple[str, ...]) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _text(description: str) -> Schema:
    return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _integer(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _stop() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _token_id() -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
