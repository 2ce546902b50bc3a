"""Every field of every request of the schema is in a table: honoured, and how that shows, or refused, and with what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor

from edge.core.life_events import Phase
from edge.legs import LegOrder
from edge.settings import Limits
from enginelink.retention import TokenRange
from openengine.v1 import generation_pb2, model_pb2, service_pb2
from tests.edge.grpc.harness import Client, FrontEnd, front_end, request, text_of
from tests.edge.http.harness import MODEL

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND


@dataclass(frozen=True)
class Honoured:
    """`shows`: whether the worker was asked for it, given these fields of a request."""

    fields: dict[str, Any]
    shows: Callable[[LegOrder], object]


@dataclass(frozen=True)
class Refused:
    fields: dict[str, Any]
    code: grpc.StatusCode = UNIMPLEMENTED
    named: str = ""


@dataclass(frozen=True)
class ShownElsewhere:
    """By the test of that name."""

    test: str


def sampling(name: str, value: float) -> Honoured:
    return Honoured({"sampling": {name: value}}, lambda order: getattr(order.sampling, name) == value)


def candidates(**selection: Any) -> dict[str, Any]:
    return {"response": {"output_candidates": selection}}


LEGS, CONTROL, EVENTS = "test_legs.py", "test_control.py", "test_kv_events.py"
TABLE: dict[str, Honoured | Refused | ShownElsewhere] = {
    "GenerateRequest.request_id": Refused({"request_id": ""}, INVALID, "request_id"),
    "GenerateRequest.model": Refused({"model": "unknown"}, NOT_FOUND, "unknown"),
    "GenerateRequest.prompt": Honoured({"prompt": "abc"}, lambda order: list(order.token_ids[::4]) == list(b"abc")),
    "GenerateRequest.token_ids": Honoured(
        {"token_ids": {"ids": [1, 2]}}, lambda order: order.token_ids == b"\1\0\0\0\2\0\0\0"
    ),
    "TokenIds.ids": Refused({"token_ids": {"ids": [100_000]}}, INVALID, "token_ids"),
    "GenerateRequest.sampling": sampling("temperature", 0.5),
    "SamplingParams.temperature": sampling("temperature", 0.0),
    "SamplingParams.top_p": sampling("top_p", 0.5),
    "SamplingParams.top_k": sampling("top_k", 3),
    "SamplingParams.min_p": sampling("min_p", 0.25),
    "SamplingParams.frequency_penalty": sampling("frequency_penalty", -1.5),
    "SamplingParams.presence_penalty": sampling("presence_penalty", 1.5),
    "SamplingParams.repetition_penalty": sampling("repetition_penalty", 1.25),
    "SamplingParams.seed": sampling("seed", 2**64 - 1),
    "SamplingParams.num_sequences": ShownElsewhere("test_generate.py"),
    "GenerateRequest.stopping": Honoured({"stopping": {"max_tokens": 3}}, lambda order: order.stops.max_tokens == 3),
    "StoppingOptions.max_tokens": Honoured({"stopping": {"max_tokens": 2}}, lambda order: order.stops.max_tokens == 2),
    "StoppingOptions.min_tokens": Honoured({"stopping": {"min_tokens": 2}}, lambda order: order.stops.min_tokens == 2),
    "StoppingOptions.conditions": ShownElsewhere("test_generate.py"),
    "StopCondition.stop_text": ShownElsewhere("test_generate.py"),
    "StopCondition.stop_token_id": Honoured(
        {"stopping": {"conditions": [{"stop_token_id": 7}]}}, lambda order: order.stops.stop_token_ids == (7,)
    ),
    "StoppingOptions.ignore_eos": Honoured({"stopping": {"ignore_eos": True}}, lambda order: order.stops.ignore_eos),
    "StoppingOptions.include_stop_in_output": Refused({"stopping": {"include_stop_in_output": True}}),
    "GenerateRequest.response": Honoured(
        {"response": {"return_output_logprobs": True}}, lambda order: order.sampling.logprobs == 0
    ),
    "ResponseOptions.return_prompt_logprobs": Refused({"response": {"return_prompt_logprobs": True}}),
    "ResponseOptions.prompt_candidates": Refused({"response": {"prompt_candidates": {"top_n": 1}}}),
    "ResponseOptions.return_output_logprobs": Honoured(
        {"response": {"return_output_logprobs": True}}, lambda order: order.sampling.logprobs == 0
    ),
    "ResponseOptions.output_candidates": Honoured(candidates(top_n=3), lambda order: order.sampling.logprobs == 3),
    "ResponseOptions.prompt_logprob_start": Refused({"response": {"prompt_logprob_start": 0}}),
    "CandidateTokenSelection.top_n": Honoured(candidates(top_n=20), lambda order: order.sampling.logprobs == 20),
    "CandidateTokenSelection.token_ids": Refused(candidates(token_ids={"ids": [1]}), named="token_ids"),
    "CandidateTokenSelection.all": Refused(candidates(all={}), named="all"),
    "GenerateRequest.kv": Honoured({"kv": {"bypass_prefix_cache": True}}, lambda order: order.bypass_prefix_cache),
    "KvOptions.session": ShownElsewhere(LEGS),
    "KvOptions.bypass_prefix_cache": Honoured(
        {"kv": {"bypass_prefix_cache": True}}, lambda order: order.bypass_prefix_cache
    ),
    "KvOptions.cache_salt": ShownElsewhere("test_hints.py"),
    "GenerateRequest.guided": Refused({"guided": {"json_object": {}}}),
    "GuidedDecoding.json_schema": Refused({"guided": {"json_schema": "{}"}}, named="guided"),
    "GuidedDecoding.regex": Refused({"guided": {"regex": "a"}}, named="guided"),
    "GuidedDecoding.ebnf_grammar": Refused({"guided": {"ebnf_grammar": "a"}}, named="guided"),
    "GuidedDecoding.structural_tag": Refused({"guided": {"structural_tag": "a"}}, named="guided"),
    "GuidedDecoding.choice": Refused({"guided": {"choice": {}}}, named="guided"),
    "ChoiceConstraint.choices": Refused({"guided": {"choice": {"choices": ["a"]}}}, named="guided"),
    "GuidedDecoding.json_object": Refused({"guided": {"json_object": {}}}, named="guided"),
    "GuidedDecoding.backend": Refused({"guided": {"backend": "a"}}, named="guided"),
    "GenerateRequest.media": Refused({"media": [{}]}),
    "MediaItem.modality": Refused({"media": [{"modality": 1}]}, named="media"),
    "MediaItem.url": Refused({"media": [{"url": "http://x"}]}, named="media"),
    "MediaItem.data_uri": Refused({"media": [{"data_uri": "data:,"}]}, named="media"),
    "MediaItem.raw_bytes": Refused({"media": [{"raw_bytes": b"x"}]}, named="media"),
    "MediaItem.mime_type": Refused({"media": [{"mime_type": "a/b"}]}, named="media"),
    "MediaItem.uuid": Refused({"media": [{"uuid": "u"}]}, named="media"),
    "GenerateRequest.lora_name": Refused({"lora_name": "a"}),
    "GenerateRequest.extra": Honoured({"extra": {"unknown": [1, {"deep": None}]}}, lambda order: True),
    "KvSessionRef.session_id": ShownElsewhere(LEGS),
    "KvSessionRef.transfer_backend": ShownElsewhere(LEGS),
    "KvSessionRef.endpoints": ShownElsewhere(LEGS),
    "KvSessionRef.dp_rank": ShownElsewhere(LEGS),
    "KvSessionRef.attributes_struct": ShownElsewhere(LEGS),
    "KvEndpoint.host": ShownElsewhere(LEGS),
    "KvEndpoint.port": ShownElsewhere(LEGS),
    "KvEndpoint.protocol": ShownElsewhere(LEGS),
    "GetModelInfoRequest.model": ShownElsewhere(CONTROL),
    "GetLoadRequest.include_per_rank": ShownElsewhere(CONTROL),
    "HealthRequest.include_inference_probe": ShownElsewhere(CONTROL),
    "HealthRequest.model": ShownElsewhere(CONTROL),
    "HealthRequest.role": ShownElsewhere(CONTROL),
    "AbortRequest.request_id": ShownElsewhere(CONTROL),
    "AbortRequest.kv_session": ShownElsewhere(LEGS),
    "AbortRequest.all_requests": ShownElsewhere(CONTROL),
    "LoadLoraRequest.adapter": ShownElsewhere(CONTROL),
    "LoraAdapter.lora_id": ShownElsewhere(CONTROL),
    "LoraAdapter.lora_name": ShownElsewhere(CONTROL),
    "LoraAdapter.source_path": ShownElsewhere(CONTROL),
    "UnloadLoraRequest.lora_name": ShownElsewhere(CONTROL),
    "GetKvEventSourcesRequest.data_parallel_ranks": ShownElsewhere(CONTROL),
    "SubscribeKvEventsRequest.data_parallel_ranks": ShownElsewhere(EVENTS),
    "SubscribeKvEventsRequest.include_snapshot": ShownElsewhere(EVENTS),
    "SubscribeKvEventsRequest.start_sequence_number": ShownElsewhere(EVENTS),
}
EXTRA: dict[str, Honoured | Refused] = {
    "request_type": Refused({"extra": {"request_type": "both"}}, INVALID),
    "request_type of another type": Refused({"extra": {"request_type": 1}}, INVALID, "request_type"),
    "conversation_id": Refused({"extra": {"conversation_id": 3}}, INVALID),
    "context_and_generation": Honoured(
        {"extra": {"request_type": "context_and_generation"}}, lambda order: order.phase is Phase.AGGREGATED
    ),
    "kv_cache_retention_config": Honoured(
        {"extra": {"kv_cache_retention_config": {"priority": 20}}},
        lambda order: order.retention is not None and order.retention.ranges == (TokenRange(0, None, 20, 0),),
    ),
    "kv_cache_retention_config beyond what a tenant may have": Honoured(
        {"extra": {"kv_cache_retention_config": {"priority": 100}}},
        lambda order: order.retention is not None and order.retention.decode_priority == 35,
    ),
    "kv_cache_retention_config of another shape": Refused(
        {"extra": {"kv_cache_retention_config": "high"}}, INVALID, "kv_cache_retention_config"
    ),
}
OUT_OF_RANGE = [
    {"sampling": {"temperature": float("nan")}},
    {"sampling": {"temperature": -0.5}},
    {"sampling": {"top_p": 0.0}},
    {"sampling": {"top_k": -2}},
    {"sampling": {"min_p": 1.5}},
    {"sampling": {"frequency_penalty": 2.5}},
    {"sampling": {"presence_penalty": float("inf")}},
    {"sampling": {"repetition_penalty": 0.0}},
    {"stopping": {"max_tokens": 0}},
    {"stopping": {"max_tokens": 1, "min_tokens": 2}},
    {"stopping": {"conditions": [{}]}},
    {"stopping": {"conditions": [{"stop_text": ""}]}},
    {"stopping": {"conditions": [{"stop_text": "x" * 1025}]}},
    {"stopping": {"conditions": [{"stop_token_id": 1}] * 65}},
    {"response": {"output_candidates": {"top_n": 21}}},
    {"token_ids": {"ids": []}},
    {"prompt": ""},
    {"prompt": "x" * 600},
    {"request_id": "x" * 257},
]


def requests() -> Iterator[Descriptor]:
    for service in service_pb2.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            yield method.input_type


def fields_of(message: Descriptor, seen: set[str]) -> Iterator[str]:
    if message.full_name in seen or not message.full_name.startswith("openengine."):
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield f"{message.name}.{field.name}"
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def test_the_table_has_every_field_of_every_request_and_no_other() -> None:
    seen: set[str] = set()

    assert {name for message in requests() for name in fields_of(message, seen)} == set(TABLE)


def honoured(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(row, id=name) for name, row in table.items() if isinstance(row, Honoured)]


def refused(table: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(row, row.named or name.rpartition(".")[2], id=name)
        for name, row in table.items()
        if isinstance(row, Refused)
    ]


@pytest.mark.parametrize("row", honoured(TABLE) + honoured(EXTRA))
def test_what_is_honoured_reaches_the_worker(edge: FrontEnd, client: Client, row: Honoured) -> None:
    client.answer(request(**row.fields))

    (order,) = edge.worker.orders
    assert row.shows(order)


@pytest.mark.parametrize(("row", "named"), refused(TABLE) + refused(EXTRA))
def test_what_is_refused_is_a_status_that_names_the_field(
    edge: FrontEnd, client: Client, row: Refused, named: str
) -> None:
    code, message = client.refused(request(**row.fields))

    assert code == row.code
    assert named in message
    assert not edge.worker.orders


@pytest.mark.parametrize("fields", OUT_OF_RANGE, ids=lambda fields: repr(fields)[:60])
def test_what_is_out_of_range_is_invalid(edge: FrontEnd, client: Client, fields: dict[str, Any]) -> None:
    code, message = client.refused(request(**fields))

    assert code == INVALID
    assert message
    assert not edge.worker.orders


def test_a_request_without_an_input_is_invalid(client: Client) -> None:
    code, message = client.refused(generation_pb2.GenerateRequest(request_id="r", model=MODEL))

    assert (code, message) == (INVALID, "input is missing: prompt or token_ids")


def test_what_is_advertised_is_what_is_accepted(client: Client) -> None:
    model = client.ask("GetModelInfo", model_pb2.GetModelInfoRequest(model=MODEL))
    can = model.generation
    top_n = can.output_logprobs.max_top_n
    tried: dict[str, tuple[bool, dict[str, Any]]] = {
        "text": (model.supports_text_input, {"prompt": "a"}),
        "token ids": (model.supports_token_ids_input, {"token_ids": {"ids": [1]}}),
        "longest prompt": (True, {"token_ids": {"ids": [1] * model.max_output_tokens}}),
        "longer prompt": (False, {"token_ids": {"ids": [1] * model.max_context_length}}),
        "outputs": (True, {"sampling": {"num_sequences": can.max_num_sequences}}),
        "more outputs": (False, {"sampling": {"num_sequences": can.max_num_sequences + 1}}),
        "log probabilities": (can.output_logprobs.supported, candidates(top_n=top_n)),
        "more log probabilities": (False, candidates(top_n=top_n + 1)),
        "prompt's": (can.prompt_logprobs.supported, {"response": {"return_prompt_logprobs": True}}),
        "guided": (can.guided_decoding.supported, {"guided": {"regex": "a"}}),
        "stop in output": (can.supports_stop_in_output, {"stopping": {"include_stop_in_output": True}}),
        "salt": (can.supports_cache_salt, {"kv": {"cache_salt": "s"}}),
        "bypass": (can.supports_prefix_cache_bypass, {"kv": {"bypass_prefix_cache": True}}),
        "adapters": (model.supports_lora, {"lora_name": "a"}),
        "media": (model.supports_multimodal, {"media": [{}]}),
    }

    accepted = {}
    for name, (_, fields) in tried.items():
        call = client.generate(request(max_tokens=1, **fields))
        with contextlib.suppress(grpc.RpcError):
            list(call)
        accepted[name] = call.code() is grpc.StatusCode.OK

    assert accepted == {name: advertised for name, (advertised, _) in tried.items()}


def test_absent_options_are_the_protocols_defaults(edge: FrontEnd, client: Client) -> None:
    assert text_of(client.answer(request())) == "Hello!"

    (order,) = edge.worker.orders
    assert (order.sampling.temperature, order.sampling.top_p, order.sampling.seed) == (1.0, 1.0, None)
    assert order.sampling.logprobs is None
    assert not order.bypass_prefix_cache


def test_where_no_tenant_may_bypass_the_cache_it_is_used_and_that_is_advertised(text_folder: Path) -> None:
    with front_end(text_folder, limits=Limits(tenant_bypass_prefix_cache=False)) as edge, edge.client() as client:
        client.answer(request(kv={"bypass_prefix_cache": True}))
        can = client.ask("GetModelInfo", model_pb2.GetModelInfoRequest(model=MODEL)).generation

    (order,) = edge.worker.orders
    assert not order.bypass_prefix_cache
    assert can.HasField("supports_prefix_cache_bypass")
    assert not can.supports_prefix_cache_bypass
