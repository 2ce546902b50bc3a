"""GenerateRequest as the edge's own words. Every field is honoured, or refused by its name; `extra` may hold more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf import json_format, struct_pb2

from edge.core.types import SamplingOptions, StopOptions
from edge.grpc.errors import invalid, refusing
from edge.http.models import Catalogue, ServedModel
from edge.tokenizing.incremental import pack
from enginelink import generate_rules as rules
from enginelink import retention
from enginelink.retention import Retention, RetentionBounds, RetentionError
from openengine.v1 import generation_pb2 as wire
from openengine.v1 import kv_pb2

BOTH_PHASES = "context_and_generation"
IDENTIFYING_LENGTH = 512
"""Characters or token ids at a prompt's beginning that are taken not to change between turns, as over HTTP."""
SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class Asked:
    """`text` None: the prompt came as `token_ids`, packed. `session`: sealed, of a generation leg. `request_type`: one
    of the protocol's three."""

    request_id: str
    model: ServedModel
    request_type: str
    text: str | None
    token_ids: bytes
    sampling: SamplingOptions
    outputs: int
    max_tokens: int | None
    min_tokens: int
    stop_texts: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    session: kv_pb2.KvSessionRef | None
    cache_salt: str
    bypass_prefix_cache: bool
    conversation: str
    retention: Retention | None

    async def tokenize(self, scope: bytes, tenant: bytes) -> bytes:
        """Once it is the turn of `tenant`, a tag. Raises EdgeError."""
        if self.text is None:
            return self.token_ids
        ids = await self.model.text.tokenize_text_async(self.text, scope=scope, tenant=tenant)
        if not ids:
            raise invalid("prompt is empty")
        return ids

    def identifying_content(self) -> bytes:
        """What is the same at every turn of a conversation that has no id."""
        if self.text is not None:
            return orjson.dumps(self.text[:IDENTIFYING_LENGTH])
        return orjson.dumps(list(memoryview(self.token_ids).cast("I")[:IDENTIFYING_LENGTH]))

    def stops(self, room: int) -> StopOptions:
        """`room`: the tokens that fit behind the prompt, at least 1."""
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        return StopOptions(max_tokens, min(self.min_tokens, max_tokens), self.stop_token_ids, self.ignore_eos)

    @property
    def stopping_ids(self) -> frozenset[int]:
        """Tokens that end an answer and are no part of it."""
        eos = () if self.ignore_eos else self.model.text.eos_token_ids
        return frozenset((*self.stop_token_ids, *eos))

    def stop_match(self, token_id: int) -> wire.StopMatch:
        if token_id in self.model.text.eos_token_ids and not self.ignore_eos:
            return wire.StopMatch(eos_token_id=token_id)
        return wire.StopMatch(stop_token_id=token_id)


def read_asked(
    message: wire.GenerateRequest, catalogue: Catalogue, *, max_outputs: int, bounds: RetentionBounds
) -> Asked:
    """Raises EdgeError naming the field."""
    model = catalogue.find(message.model)
    with refusing():
        rules.require_request(message)
        rules.require_sampling(message.sampling, max_sequences=max_outputs)
        rules.require_stopping(message.stopping)
        logprobs = rules.logprobs_of(message.response)
        has_session = message.kv.HasField("session")
        request_type = rules.request_type_of(message.extra, has_session=has_session) or BOTH_PHASES
        conversation = rules.text_of(message.extra, "conversation_id")
    outputs = message.sampling.num_sequences or 1
    if request_type != BOTH_PHASES and outputs != 1:
        raise invalid(f"sampling.num_sequences is {outputs}: a single leg has one output")
    if request_type == "generation_only" and not has_session:
        raise invalid("kv.session is missing: extra.request_type is generation_only")
    stopping = message.stopping
    return Asked(
        request_id=message.request_id,
        model=model,
        request_type=request_type,
        text=message.prompt if message.WhichOneof("input") == "prompt" else None,
        token_ids=_token_ids(message, model),
        sampling=_sampling(message.sampling, logprobs),
        outputs=outputs,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop_texts=tuple(rules.stop_texts(stopping)),
        stop_token_ids=tuple(rules.stop_token_ids(stopping)),
        ignore_eos=stopping.ignore_eos,
        session=message.kv.session if has_session else None,
        cache_salt=message.kv.cache_salt,
        bypass_prefix_cache=message.kv.bypass_prefix_cache,
        conversation=conversation,
        retention=_retention(message.extra, bounds),
    )


def _token_ids(message: wire.GenerateRequest, model: ServedModel) -> bytes:
    match message.WhichOneof("input"):
        case "prompt":
            return b""
        case "token_ids":
            ids = list(message.token_ids.ids)
            if not ids:
                raise invalid("token_ids is empty: a prompt has at least one token")
            if max(ids) >= model.text.vocabulary_size:
                raise invalid(f"token_ids has an id outside of the vocabulary of {model.text.vocabulary_size}")
            return pack(ids)
    raise invalid("input is missing: prompt or token_ids")


def _sampling(message: wire.SamplingParams, logprobs: int | None) -> SamplingOptions:
    """What is absent is the protocol's default: temperature 1, everything else off."""
    given: Mapping[str, Any] = {
        name: getattr(message, name)
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        if message.HasField(name)
    }
    seed = message.seed if message.HasField("seed") else None
    return SamplingOptions(**given, top_k=max(0, message.top_k), seed=seed, logprobs=logprobs)


def _retention(extra: struct_pb2.Struct, bounds: RetentionBounds) -> Retention | None:
    if retention.FIELD not in extra.fields:
        return None
    path = f"extra.{retention.FIELD}"
    try:
        asked: Any = json_format.MessageToDict(extra.fields[retention.FIELD])
        return None if asked is None else bounds.clamp(retention.read_retention(asked, path))
    except RetentionError as error:
        raise invalid(str(error)) from error
    except (json_format.Error, ValueError, RecursionError) as error:
        raise invalid(f"{path}: {error}") from error
