"""Every field of a GenerateRequest is honoured by a worker, or refused by name: one without a row here fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openengine.v1 import error_pb2, generation_pb2
from tests.worker.clients import generate_request
from tests.worker.running import MODEL_NAME
from worker.core.handoff import KvShape, KvSource, SessionRef
from worker.core.networks import AllowedNetworks
from worker.core.types import Request, RequestKey
from worker.intake import Intake, Served
from worker.keys import WorkerKeys
from worker.lineage import Envelopes
from worker.metadata import Metadata
from worker.refusal import Refused

PROMPT = list(range(40, 60))
SHAPE = KvShape(num_layers=2, num_kv_heads=2, head_dim=16, tokens_per_block=4, dtype="float32")
SERVED = Served(MODEL_NAME, "aggregated", 259, 512, frozenset({2}), SHAPE, AllowedNetworks())
INVALID, UNSUPPORTED = error_pb2.ERROR_CODE_INVALID_ARGUMENT, error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE
SESSION = SessionRef("0" * 32, "f" * 64, "i", "", 1, 5, 20, 0, SHAPE, (KvSource("127.0.0.1", 9, 0, 2),)).to_message()


@dataclass(frozen=True)
class Honoured:
    """`shows`: that the engine is told, given these fields."""

    fields: dict[str, Any]
    shows: Callable[[Request], object]


@dataclass(frozen=True)
class RefusedBy:
    fields: dict[str, Any]
    named: str
    code: int = UNSUPPORTED


@dataclass(frozen=True)
class ShownBy:
    """A test of this name, of a worker that runs."""

    test: str


def sampling(name: str, value: float) -> Honoured:
    return Honoured({"sampling": {name: value}}, lambda request: getattr(request.sampling, name) == value)


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": fields}


def candidates(**selection: Any) -> dict[str, Any]:
    return {"response": {"output_candidates": selection}}


def session(**changes: Any) -> dict[str, Any]:
    """A reference with these fields instead of its own."""
    altered = type(SESSION).FromString(SESSION.SerializeToString())
    for name, value in changes.items():
        altered.ClearField(name)
        altered.MergeFrom(type(SESSION)(**{name: value}))
    return {"kv": {"session": altered}}


def endpoint(**changes: Any) -> dict[str, Any]:
    return session(endpoints=[{"host": "127.0.0.1", "port": 9, "protocol": "kinroute-tcp"} | changes])


ROWS: dict[str, Honoured | RefusedBy | ShownBy] = {
    "GenerateRequest.request_id": RefusedBy({"request_id": ""}, "request_id", INVALID),
    "GenerateRequest.model": RefusedBy({"model": "x"}, "model", error_pb2.ERROR_CODE_MODEL_NOT_FOUND),
    "GenerateRequest.prompt": ShownBy("test_text_in_and_out_is_the_tokenizers"),
    "GenerateRequest.token_ids": Honoured({}, lambda request: request.token_ids.tolist() == PROMPT),
    "TokenIds.ids": Honoured({}, lambda request: request.token_ids.tolist() == PROMPT),
    "GenerateRequest.sampling": sampling("temperature", 0.5),
    "SamplingParams.temperature": sampling("temperature", 0.5),
    "SamplingParams.top_p": sampling("top_p", 0.5),
    "SamplingParams.top_k": sampling("top_k", 3),
    "SamplingParams.min_p": sampling("min_p", 0.25),
    "SamplingParams.frequency_penalty": sampling("frequency_penalty", -1.5),
    "SamplingParams.presence_penalty": sampling("presence_penalty", 1.5),
    "SamplingParams.repetition_penalty": sampling("repetition_penalty", 1.25),
    "SamplingParams.seed": sampling("seed", 2**64 - 1),
    "SamplingParams.num_sequences": RefusedBy({"sampling": {"num_sequences": 2}}, "num_sequences"),
    "GenerateRequest.stopping": Honoured(stopping(max_tokens=3), lambda request: request.stopping.max_tokens == 3),
    "StoppingOptions.max_tokens": Honoured(stopping(max_tokens=3), lambda request: request.stopping.max_tokens == 3),
    "StoppingOptions.min_tokens": Honoured(
        stopping(max_tokens=3, min_tokens=2), lambda request: request.stopping.min_tokens == 2
    ),
    "StoppingOptions.conditions": RefusedBy(stopping(conditions=[{}]), "conditions", INVALID),
    "StopCondition.stop_text": ShownBy("test_a_stop_text_ends_the_answer_before_it_and_is_named"),
    "StopCondition.stop_token_id": Honoured(
        stopping(conditions=[{"stop_token_id": 7}]), lambda request: request.stopping.stop_token_ids == {2, 7}
    ),
    "StoppingOptions.ignore_eos": Honoured(
        stopping(ignore_eos=True), lambda request: not request.stopping.stop_token_ids
    ),
    "StoppingOptions.include_stop_in_output": RefusedBy(stopping(include_stop_in_output=True), "include_stop"),
    "GenerateRequest.response": Honoured(
        {"response": {"return_output_logprobs": True}}, lambda request: request.sampling.logprobs == 0
    ),
    "ResponseOptions.return_prompt_logprobs": RefusedBy({"response": {"return_prompt_logprobs": True}}, "prompt_log"),
    "ResponseOptions.prompt_candidates": RefusedBy({"response": {"prompt_candidates": {"top_n": 1}}}, "prompt_cand"),
    "ResponseOptions.return_output_logprobs": Honoured(
        {"response": {"return_output_logprobs": True}}, lambda request: request.sampling.logprobs == 0
    ),
    "ResponseOptions.output_candidates": Honoured(candidates(top_n=3), lambda request: request.sampling.logprobs == 3),
    "ResponseOptions.prompt_logprob_start": RefusedBy({"response": {"prompt_logprob_start": 0}}, "prompt_logprob_st"),
    "CandidateTokenSelection.top_n": RefusedBy(candidates(top_n=21), "top_n", INVALID),
    "CandidateTokenSelection.token_ids": RefusedBy(candidates(token_ids={"ids": [1]}), "token_ids"),
    "CandidateTokenSelection.all": RefusedBy(candidates(all={}), "all"),
    "GenerateRequest.kv": Honoured({"kv": {"cache_salt": "x"}}, lambda request: request.salt == b"x"),
    "KvOptions.session": Honoured(session(), lambda request: request.first_token == 5),
    "KvOptions.bypass_prefix_cache": Honoured(
        {"kv": {"bypass_prefix_cache": True}}, lambda request: request.bypass_prefix_cache
    ),
    "KvOptions.cache_salt": Honoured({"kv": {"cache_salt": "x"}}, lambda request: request.salt == b"x"),
    "KvSessionRef.session_id": RefusedBy(session(session_id="x"), "session_id", INVALID),
    "KvSessionRef.transfer_backend": RefusedBy(session(transfer_backend="nixl"), "transfer_backend", INVALID),
    "KvSessionRef.endpoints": RefusedBy(session(endpoints=[]), "endpoints", INVALID),
    "KvSessionRef.dp_rank": RefusedBy(session(dp_rank=1), "dp_rank", INVALID),
    "KvSessionRef.attributes_struct": RefusedBy(session(attributes_struct={}), "attributes_struct", INVALID),
    "KvEndpoint.host": RefusedBy(endpoint(host="192.0.2.1"), "allowed_networks", INVALID),
    "KvEndpoint.port": RefusedBy(endpoint(port=0), "port", INVALID),
    "KvEndpoint.protocol": RefusedBy(endpoint(protocol="tcp"), "protocol", INVALID),
    "GenerateRequest.guided": RefusedBy({"guided": {"json_object": {}}}, "guided"),
    "GuidedDecoding.json_schema": RefusedBy({"guided": {"json_schema": "{}"}}, "guided"),
    "GuidedDecoding.regex": RefusedBy({"guided": {"regex": "a"}}, "guided"),
    "GuidedDecoding.ebnf_grammar": RefusedBy({"guided": {"ebnf_grammar": "a"}}, "guided"),
    "GuidedDecoding.structural_tag": RefusedBy({"guided": {"structural_tag": "a"}}, "guided"),
    "GuidedDecoding.choice": RefusedBy({"guided": {"choice": {}}}, "guided"),
    "ChoiceConstraint.choices": RefusedBy({"guided": {"choice": {"choices": ["a"]}}}, "guided"),
    "GuidedDecoding.json_object": RefusedBy({"guided": {"json_object": {}}}, "guided"),
    "GuidedDecoding.backend": RefusedBy({"guided": {"backend": "a"}}, "guided"),
    "GenerateRequest.media": RefusedBy({"media": [{}]}, "media"),
    "MediaItem.modality": RefusedBy({"media": [{"modality": 1}]}, "media"),
    "MediaItem.url": RefusedBy({"media": [{"url": "http://x"}]}, "media"),
    "MediaItem.data_uri": RefusedBy({"media": [{"data_uri": "data:,"}]}, "media"),
    "MediaItem.raw_bytes": RefusedBy({"media": [{"raw_bytes": b"x"}]}, "media"),
    "MediaItem.mime_type": RefusedBy({"media": [{"mime_type": "a/b"}]}, "media"),
    "MediaItem.uuid": RefusedBy({"media": [{"uuid": "u"}]}, "media"),
    "GenerateRequest.lora_name": RefusedBy({"lora_name": "a"}, "lora_name"),
    "GenerateRequest.extra": Honoured(
        {"extra": {"conversation_id": "c", "unknown": [1]}}, lambda request: request.conversation == "c"
    ),
}


def fields_of(message: Any, seen: set[str]) -> Iterator[str]:
    """Of it and of all messages in it, but of the library's own."""
    if message.full_name in seen or not message.full_name.startswith("openengine."):
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield f"{message.name}.{field.name}"
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def taken(fields: dict[str, Any]) -> Request:
    intake = Intake(SERVED, Envelopes(WorkerKeys(None), "this-start", required=False))
    given = {"stopping": {}, **fields}
    message = generate_request(PROMPT, **given)
    return intake.from_generate(RequestKey(1), message, np.array(PROMPT, np.int32), Metadata())


def test_every_field_of_the_schema_has_a_row() -> None:
    assert set(fields_of(generation_pb2.GenerateRequest.DESCRIPTOR, set())) == set(ROWS)
    elsewhere = Path(__file__).with_name("test_openengine.py").read_text()
    assert all(f"def {row.test}(" in elsewhere for row in ROWS.values() if isinstance(row, ShownBy))


@pytest.mark.parametrize("row", [row for row in ROWS.values() if isinstance(row, Honoured)])
def test_what_is_honoured_reaches_the_engine(row: Honoured) -> None:
    assert row.shows(taken(row.fields))


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, row in ROWS.items() if isinstance(row, RefusedBy)])
def test_what_is_not_is_refused_by_its_name(name: str, row: RefusedBy) -> None:
    with pytest.raises(Refused) as caught:
        taken(row.fields)

    assert caught.value.code == row.code, name
    assert row.named in caught.value.message
