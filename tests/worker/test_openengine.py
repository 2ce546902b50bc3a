"""A worker speaks OpenEngine by its rules, to any client."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from enginelink.block_keys import BlockScope, block_keys, scope_key
from enginelink.envelope import LIFE_S, PURPOSE_SUBMIT, Claims, Key, Signer, prompt_sha256
from openengine.v1 import error_pb2, generation_pb2, kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, server_pb2
from tests.tiny_models import make_tiny_model, make_tokenizer
from tests.worker.clients import OpenEngine, generate_request, status_of, token_ids
from tests.worker.running import MODEL_NAME, Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROMPT = list(range(40, 60))
LONG = 500


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    with worker(folder, make_tiny_model(folder / "model")) as started:
        started.wait_for("ready")
        yield started


@pytest.fixture
def client(running: Running) -> Iterator[OpenEngine]:
    with OpenEngine(running.grpc) as connected:
        yield connected
    running.wait_clean()


def refused(
    client: OpenEngine, request: generation_pb2.GenerateRequest, **metadata: str
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(client.generate(request, [(key.replace("_", "-"), value) for key, value in metadata.items()]))
    return status_of(caught)


def test_a_request_ends_with_one_finished_that_alone_carries_usage(client: OpenEngine) -> None:
    responses = client.answer(generate_request(PROMPT, 4))

    *tokens, last = responses
    assert [response.WhichOneof("event") for response in responses] == ["token"] * 4 + ["finished"]
    assert all(response.token.HasField("output_index") and not response.HasField("usage") for response in tokens)
    assert last.finished.reason == generation_pb2.FINISH_REASON_LENGTH
    assert last.finished.HasField("output_index")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (20, 4, 24)


def test_text_in_and_out_is_the_tokenizers(client: OpenEngine) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("some text").ids

    from_text = client.answer(generate_request("some text", 8))
    from_ids = client.answer(generate_request(ids, 8))

    assert token_ids(from_text) == token_ids(from_ids)
    text = "".join(response.token.text for response in from_text)
    whole: str = tokenizer.decode(token_ids(from_text))
    assert whole.startswith(text)
    assert text


def test_blocks_have_the_priority_that_the_request_asked_for_where_it_inserts_them(
    client: OpenEngine, running: Running
) -> None:
    prompt = list(range(100, 120))
    keys = block_keys(scope_key(BlockScope()), np.array(prompt, "<i4").tobytes(), 4)
    ranges = [{"token_start": 0, "token_end": 5, "priority": 80}, {"token_start": 9, "priority": 10}]

    def asking(ranges: list[dict[str, int]]) -> generation_pb2.GenerateRequest:
        config = {"token_range_retention_configs": ranges, "decode_retention_priority": 5}
        return generate_request(prompt, 8, extra={"kv_cache_retention_config": config})

    client.answer(asking(ranges))
    client.answer(asking([{"token_start": 0, "priority": 0}]))

    told = [running.get(f"/kinroute/v1/blocks/{key.hex()}") for key in keys]
    assert [block["priority"] for block in told] == [80, 80, 35, 10, 10], "what was there already keeps what it had"


def test_a_stop_text_ends_the_answer_before_it_and_is_named(client: OpenEngine) -> None:
    prompt = make_tokenizer().encode("tell me").ids
    whole = "".join(response.token.text for response in client.answer(generate_request(prompt, 24)))
    stop = whole[5:8]
    conditions = [generation_pb2.StopCondition(stop_text=stop)]

    stopping = generation_pb2.StoppingOptions(max_tokens=24, ignore_eos=True, conditions=conditions)
    responses = client.answer(generate_request(prompt, stopping=stopping))

    assert "".join(response.token.text for response in responses) == whole[: whole.index(stop)]
    assert responses[-1].finished.stop_match.stop_text == stop


def test_a_stop_token_ends_the_answer_and_is_named(client: OpenEngine) -> None:
    ids = token_ids(client.answer(generate_request(PROMPT, 8)))
    stop = ids[3]
    conditions = [generation_pb2.StopCondition(stop_token_id=stop)]

    stopping = generation_pb2.StoppingOptions(max_tokens=8, ignore_eos=True, conditions=conditions)
    responses = client.answer(generate_request(PROMPT, stopping=stopping))

    assert token_ids(responses) == list(itertools.takewhile(lambda token: token != stop, ids))
    assert responses[-1].finished.reason == generation_pb2.FINISH_REASON_STOP
    assert responses[-1].finished.stop_match.stop_token_id == stop


def test_log_probabilities_come_with_the_best_candidates(client: OpenEngine) -> None:
    response = generation_pb2.ResponseOptions(output_candidates=generation_pb2.CandidateTokenSelection(top_n=3))

    token = client.answer(generate_request(PROMPT, 1, response=response))[0].token.tokens[0]

    assert len(token.candidates) == 3
    assert token.candidates[0].token_id == token.token_id
    assert token.candidates[0].logprob == token.logprob
    assert token.rank == 1


def test_cached_prompt_tokens_are_whole_blocks_and_the_salt_separates_them(client: OpenEngine) -> None:
    prompt = [7, 3, *PROMPT]
    client.answer(generate_request(prompt, 1))

    again = client.answer(generate_request(prompt, 1))[-1].usage.cached_prompt_tokens
    salted = client.answer(generate_request(prompt, 1, kv=generation_pb2.KvOptions(cache_salt="x")))
    bypassed = client.answer(generate_request(prompt, 1, kv=generation_pb2.KvOptions(bypass_prefix_cache=True)))

    assert again == 20
    assert salted[-1].usage.cached_prompt_tokens == 0
    assert bypassed[-1].usage.cached_prompt_tokens == 0


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"lora_name": "a"}, grpc.StatusCode.UNIMPLEMENTED, "lora_name"),
        ({"media": [generation_pb2.MediaItem(url="http://x")]}, grpc.StatusCode.UNIMPLEMENTED, "media"),
        ({"guided": generation_pb2.GuidedDecoding(regex="a")}, grpc.StatusCode.UNIMPLEMENTED, "guided"),
        ({"extra": {"request_type": "both"}}, grpc.StatusCode.INVALID_ARGUMENT, "request_type"),
        ({"extra": {"conversation_id": 3}}, grpc.StatusCode.INVALID_ARGUMENT, "conversation_id"),
        ({"extra": {"request_type": "generation_only"}}, grpc.StatusCode.INVALID_ARGUMENT, "kv.session"),
        ({"sampling": {"num_sequences": 2}}, grpc.StatusCode.UNIMPLEMENTED, "num_sequences"),
        ({"sampling": {"top_p": 1.5}}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ({"sampling": {"temperature": float("nan")}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"stopping": {"max_tokens": 0}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"response": {"return_prompt_logprobs": True}}, grpc.StatusCode.UNIMPLEMENTED, "prompt_logprobs"),
        ({"response": {"prompt_logprob_start": 0}}, grpc.StatusCode.UNIMPLEMENTED, "prompt_logprob_start"),
        ({"response": {"prompt_candidates": {"top_n": 1}}}, grpc.StatusCode.UNIMPLEMENTED, "prompt_candidates"),
        ({"response": {"output_candidates": {"all": {}}}}, grpc.StatusCode.UNIMPLEMENTED, "output_candidates.all"),
        ({"stopping": {"max_tokens": 2, "min_tokens": 3}}, grpc.StatusCode.INVALID_ARGUMENT, "min_tokens"),
        ({"stopping": {"conditions": [{"stop_text": "x" * 2000}]}}, grpc.StatusCode.INVALID_ARGUMENT, "stop_text"),
        ({"stopping": {"include_stop_in_output": True}}, grpc.StatusCode.UNIMPLEMENTED, "include_stop_in_output"),
        ({"token_ids": {"ids": []}}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": {"ids": [1_000_000]}}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": {"ids": [1] * 3000}}, grpc.StatusCode.INVALID_ARGUMENT, "3000 tokens"),
        ({"kv": {"session": {"session_id": "x"}}}, grpc.StatusCode.INVALID_ARGUMENT, "kv.session"),
    ],
)
def test_what_cannot_be_served_is_a_status_that_names_the_field(
    client: OpenEngine, fields: dict[str, Any], code: grpc.StatusCode, named: str
) -> None:
    found, message = refused(client, generate_request(PROMPT, **fields))

    assert found == code
    assert named in message


@pytest.mark.parametrize(
    "metadata",
    [
        {"openengine_priority": "high"},
        {"openengine_target_dp_rank": "-1"},
        {"openengine_target_dp_rank": "1"},
        {"openengine_routing_key": ""},
        {"kinroute_lineage": "forged"},
        {"x_trtllm_subagent_affinity_id": "p", "x_trtllm_subagent_affinity_auth": "sha256=" + "0" * 64},
    ],
)
def test_metadata_that_is_malformed_or_unproven_is_refused(client: OpenEngine, metadata: dict[str, str]) -> None:
    code, _ = refused(client, generate_request(PROMPT, extra={"conversation_id": "c"}), **metadata)

    assert code == grpc.StatusCode.INVALID_ARGUMENT


def test_a_worker_without_keys_refuses_every_hint_however_well_signed_and_serves_the_rest(client: OpenEngine) -> None:
    info = client.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    now_s = int(time.time())
    claims = Claims(
        purpose=PURPOSE_SUBMIT,
        iss="edge",
        aud=info.instance_id,
        issued_s=now_s,
        expires_s=now_s + LIFE_S,
        jti="1",
        request_id="r",
        request_type="context_and_generation",
        model=MODEL_NAME,
        conversation="c",
        prompt_sha256=prompt_sha256(np.array(PROMPT, "<u4").tobytes()),
    )
    request = generate_request(PROMPT, 1, request_id="r", extra={"conversation_id": "c"})

    signed = refused(client, request, kinroute_lineage=Signer(Key("k", b"1" * 32)).sign(claims))

    assert signed[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert not info.extra.fields["kinroute_lineage"].bool_value
    assert not info.extra.fields["trtllm_supports_subagent_affinity"].bool_value
    assert client.answer(request)[-1].WhichOneof("event") == "finished"


def test_a_request_id_is_refused_only_while_it_is_active(client: OpenEngine) -> None:
    first = client.generate(generate_request(PROMPT, LONG, request_id="same"))
    next(first)

    code, _ = refused(client, generate_request(PROMPT, 1, request_id="same"))
    rest = list(first)

    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert rest[-1].WhichOneof("event") == "finished"
    assert client.answer(generate_request(PROMPT, 1, request_id="same"))[-1].WhichOneof("event") == "finished"


def test_an_aborted_request_ends_with_one_error_and_ok(client: OpenEngine) -> None:
    responses = client.generate(generate_request(PROMPT, LONG, request_id="mine"))
    next(responses)

    status = client.control.Abort(lifecycle_pb2.AbortRequest(request_id="mine")).status
    *_, last = responses

    assert status == lifecycle_pb2.ABORT_STATUS_ABORTED
    assert last.error.code == error_pb2.ERROR_CODE_CANCELLED
    late = client.control.Abort(lifecycle_pb2.AbortRequest(request_id="mine"))
    assert late.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (lifecycle_pb2.AbortRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (lifecycle_pb2.AbortRequest(request_id="nobody"), grpc.StatusCode.NOT_FOUND),
        (lifecycle_pb2.AbortRequest(kv_session=kv_pb2.KvSessionRef(session_id="0")), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_abort_needs_one_known_target(
    client: OpenEngine, request_: lifecycle_pb2.AbortRequest, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.control.Abort(request_)

    assert status_of(caught)[0] == code


def test_a_client_that_hangs_up_frees_its_request(client: OpenEngine, running: Running) -> None:
    responses = client.generate(generate_request(PROMPT, LONG))
    next(responses)

    responses.cancel()  # type: ignore[attr-defined]

    running.wait_clean()


def test_health_is_ready_and_its_probe_samples_a_token(client: OpenEngine) -> None:
    response = client.control.Health(lifecycle_pb2.HealthRequest(include_inference_probe=True, model=MODEL_NAME))

    assert response.state == lifecycle_pb2.HEALTH_STATE_READY
    names = {check.name: check.state for check in response.checks}
    assert names["inference_probe"] == lifecycle_pb2.HEALTH_STATE_READY
    assert {"grpc", "scheduler", "model", "kv_connector"} <= names.keys()


@pytest.mark.parametrize(
    "request_",
    [
        lifecycle_pb2.HealthRequest(model="other"),
        lifecycle_pb2.HealthRequest(role=server_pb2.ENGINE_ROLE_PREFILL),
    ],
)
def test_health_is_not_ready_for_a_model_or_a_role_that_is_not_served(
    client: OpenEngine, request_: lifecycle_pb2.HealthRequest
) -> None:
    assert client.control.Health(request_).state == lifecycle_pb2.HEALTH_STATE_NOT_READY


def test_what_it_says_of_itself_is_what_it_serves(client: OpenEngine) -> None:
    server = client.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    model = client.control.GetModelInfo(model_pb2.GetModelInfoRequest(model=MODEL_NAME))
    load = client.control.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True))

    assert server.schema_revision == server.minimum_client_revision == 1
    assert (server.engine_role, list(server.supported_models)) == (server_pb2.ENGINE_ROLE_AGGREGATED, [MODEL_NAME])
    assert (server.capacity.kv_block_size, server.capacity.total_kv_blocks) == (4, 1024)
    assert model.max_context_length == 2048
    assert model.generation.max_num_sequences == 1
    assert (load.running_requests, load.total_kv_blocks, len(load.ranks)) == (0, 1024, 1)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("LoadLora", lora_pb2.LoadLoraRequest()),
        ("ListLoras", lora_pb2.ListLorasRequest()),
    ],
)
def test_what_does_not_exist_here_is_unimplemented(client: OpenEngine, method: str, request_: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(getattr(client.control, method)(request_))

    assert status_of(caught)[0] == grpc.StatusCode.UNIMPLEMENTED


def test_control_calls_obey_the_rules_of_metadata_too(client: OpenEngine) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.control.GetLoad(
            server_pb2.GetLoadRequest(),
            metadata=[("openengine-priority", "1"), ("openengine-priority", "2")],
            timeout=10.0,
        )

    code, message = status_of(caught)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "openengine-priority" in message


def test_the_standard_health_service_says_that_it_serves(client: OpenEngine) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)

    for service in ("", "openengine.v1.Inference"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10.0)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_knows_the_services_and_their_schema(client: OpenEngine) -> None:
    database = ProtoReflectionDescriptorDatabase(client.channel)

    assert {"openengine.v1.Inference", "openengine.v1.Control"} <= set(database.get_services())
    file = database.FindFileContainingSymbol("openengine.v1.GenerateRequest")
    assert "GenerateRequest" in [message.name for message in file.message_type]


def test_a_compressed_message_is_not_unpacked(client: OpenEngine) -> None:
    stub = client.channel.unary_unary(
        "/openengine.v1.Control/GetModelInfo",
        request_serializer=model_pb2.GetModelInfoRequest.SerializeToString,
        response_deserializer=model_pb2.ModelInfo.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        stub(model_pb2.GetModelInfoRequest(model="m" * 100_000), compression=grpc.Compression.Gzip, timeout=10.0)

    assert status_of(caught)[0] == grpc.StatusCode.UNIMPLEMENTED
