"""An outside orchestrator, with a client made from the schema's table alone, drives real workers behind an edge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest

from edge.core.types import Scope
from edge.keyring import ApiKey, Keyring, digest_of, new_api_key, new_id
from tests.e2e.system import Part, System
from tests.openengine.stub import Stub
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CACHE = {"tokens_per_block": 16, "max_tokens": 8192}
PROMPT = "The quick brown fox jumps over the lazy dog, and then it thinks again about what it has done."
TOKENS = 12
WAIT_S = 20.0


@dataclass
class Fleet:
    """`caller` may name parents, `operator` may do what operators may."""

    system: System
    edge: Part
    workers: list[Part]
    caller: Stub
    operator: Stub

    def generate(self, request_id: str, prompt: str = PROMPT, **fields: Any) -> Any:
        stub = self.caller
        given: dict[str, Any] = {
            "request_id": request_id,
            "model": "tiny",
            "prompt": prompt,
            "sampling": stub.SamplingParams(temperature=0.0),
            "stopping": stub.StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
        }
        extra = fields.pop("extra", {})
        message = stub.GenerateRequest(**(given | fields))
        message.extra.update(extra)
        return message

    def context(self, request_id: str, prompt: str = PROMPT) -> Any:
        """A context leg's only response."""
        (ready,) = self.caller.generate(self.generate(request_id, prompt, extra={"request_type": "context_only"}))
        return ready

    def settled(self) -> None:
        """Until nothing of any request is left, on the edge and on the workers."""
        until(lambda: not any(httpx.get(f"{self.edge.admin}/kinroute/v1/leaks").json().values()))
        for worker in self.workers:
            until(lambda worker=worker: httpx.get(f"{worker.admin}/kinroute/v1/leaks").json()["clean"])  # type: ignore[misc]


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("grpc-front")
    with System(folder / "system", make_tiny_model(folder / "tiny")) as system:
        operator_key = add_operator(system)
        context = system.start_worker("context", role="context", kv_cache_config=CACHE)
        generation = system.start_worker("generation", role="generation", kv_cache_config=CACHE)
        listen = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
        edge = system.start_edge("edge", [context], [generation], listen=listen)
        system.wait_ready(context, generation, edge)
        with (
            Stub(edge.grpc, (("x-api-key", system.key),)) as caller,
            Stub(edge.grpc, (("authorization", f"Bearer {operator_key}"),)) as operator,
        ):
            yield Fleet(system, edge, [context, generation], caller, operator)


def add_operator(system: System) -> str:
    """A key of another tenant, with the scope of operators."""
    key = new_api_key()
    own = ApiKey(new_id(), digest_of(key), "house", "ops", (Scope.OPERATOR.value,))
    Keyring.change(
        system.keyring.path, lambda content: msgspec.structs.replace(content, api_keys=(*content.api_keys, own))
    )
    return key


def ids(responses: list[Any]) -> list[int]:
    return [info.token_id for response in responses for info in response.token.tokens]


def text(responses: list[Any]) -> str:
    return "".join(response.token.text for response in responses)


def over_http(fleet: Fleet, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {fleet.system.key}"}
    answer = httpx.post(f"{fleet.edge.http}/v1/completions", json=body, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


def status(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        list(call) if hasattr(call, "__next__") else call()
    failed: Any = caught.value
    code: grpc.StatusCode = failed.code()
    return code


def test_a_whole_turn_and_both_legs_say_what_http_says(fleet: Fleet) -> None:
    said = over_http(fleet, PROMPT)

    whole = list(fleet.caller.generate(fleet.generate("whole")))
    ready = fleet.context("context")
    leg = fleet.generate("generation")
    leg.kv.session.CopyFrom(ready.prefill_ready.kv_session)
    responses = list(fleet.caller.generate(leg))

    assert text(whole) == text(responses) == said
    assert ids(whole) == ids(responses)
    assert len(ids(whole)) == TOKENS
    assert whole[-1].finished.reason == 2  # LENGTH
    assert ready.usage.prompt_tokens == whole[-1].usage.prompt_tokens == responses[-1].usage.prompt_tokens
    assert whole[-1].usage.completion_tokens == responses[-1].usage.completion_tokens == TOKENS
    assert ready.usage.cached_prompt_tokens > 0
    fleet.settled()


def test_an_abort_ends_a_request_in_each_state(fleet: Fleet) -> None:
    stub = fleet.caller
    # While it is answered: by its id.
    long = fleet.generate("long")
    long.stopping.max_tokens = 1500
    answering = stub.generate(long)
    next(answering)
    stub.abort(stub.AbortRequest(request_id="long"))
    *_, last = answering
    assert last.error.code == 10  # CANCELLED
    # Between its legs: by its reference.
    session = fleet.context("prefilled", "Another prompt, whose pages wait.").prefill_ready.kv_session
    assert stub.getLoad(stub.GetLoadRequest()).active_kv_sessions == 1
    stub.abort(stub.AbortRequest(kv_session=session))
    assert stub.getLoad(stub.GetLoadRequest()).active_kv_sessions == 0
    late = fleet.generate("late", "Another prompt, whose pages wait.")
    late.kv.session.CopyFrom(session)
    assert list(stub.generate(late))[-1].HasField("error")
    # In its second leg.
    session = fleet.context("again").prefill_ready.kv_session
    long = fleet.generate("second")
    long.stopping.max_tokens = 1500
    long.kv.session.CopyFrom(session)
    answering = stub.generate(long)
    next(answering)
    stub.abort(stub.AbortRequest(all_requests=stub.AllRequests()))
    *_, last = answering
    assert last.error.code == 10
    # After its end, and never.
    assert stub.abort(stub.AbortRequest(request_id="second")).status == 2  # ALREADY_FINISHED
    assert status(lambda: stub.abort(stub.AbortRequest(request_id="never"))) == grpc.StatusCode.NOT_FOUND
    fleet.settled()


def test_a_reference_that_was_altered_reaches_no_worker(fleet: Fleet) -> None:
    stub = fleet.caller
    session = fleet.context("mine").prefill_ready.kv_session
    for alter in (
        lambda ref: setattr(ref.endpoints[0], "host", "127.0.0.2"),
        lambda ref: ref.attributes_struct.fields["kinroute"].struct_value.update({"prompt_tokens": 1}),
        lambda ref: ref.ClearField("attributes_struct"),
    ):
        forged = fleet.generate("forged")
        forged.kv.session.CopyFrom(session)
        alter(forged.kv.session)
        assert status(stub.generate(forged)) == grpc.StatusCode.INVALID_ARGUMENT
    theirs = fleet.generate("theirs")
    theirs.kv.session.CopyFrom(session)
    assert status(fleet.operator.generate(theirs)) == grpc.StatusCode.INVALID_ARGUMENT
    stub.abort(stub.AbortRequest(kv_session=session))
    fleet.settled()


def test_health_probes_the_workers_and_load_counts_them(fleet: Fleet) -> None:
    health = fleet.caller.health(fleet.caller.HealthRequest(include_inference_probe=True, model="tiny"))
    load = fleet.operator.getLoad(fleet.operator.GetLoadRequest(include_per_rank=True))
    model = fleet.caller.getModelInfo(fleet.caller.GetModelInfoRequest(model="tiny"))

    assert health.state == 2  # READY
    assert {check.name for check in health.checks} == {"grpc", "scheduler", "model", "inference_probe"}
    assert load.total_kv_blocks == 2 * 512
    assert [rank.total_kv_blocks for rank in load.ranks] == [512, 512]
    assert model.max_context_length == 2048
    assert (
        status(lambda: fleet.caller.getLoad(fleet.caller.GetLoadRequest(include_per_rank=True)))
        == grpc.StatusCode.PERMISSION_DENIED
    )


def test_events_of_every_worker_are_the_operators(fleet: Fleet) -> None:
    asked = fleet.caller.SubscribeKvEventsRequest(include_snapshot=True)
    assert status(fleet.caller.subscribeKvEvents(asked)) == grpc.StatusCode.PERMISSION_DENIED

    stream = fleet.operator.subscribeKvEvents(fleet.operator.SubscribeKvEventsRequest(include_snapshot=True))
    ranks = {next(stream).batch.data_parallel_rank for _ in range(2)}
    list(fleet.caller.generate(fleet.generate("told", "A prompt that nobody has asked for before, of some length.")))
    stored = next(
        response.batch for response in stream if any(event.HasField("block_stored") for event in response.batch.events)
    )
    stream.cancel()

    assert ranks == {0, 1}
    assert stored.sequence_number > 0

    only = fleet.operator.SubscribeKvEventsRequest(data_parallel_ranks=[1], include_snapshot=True)
    stream = fleet.operator.subscribeKvEvents(only)
    assert next(stream).batch.data_parallel_rank == 1
    stream.cancel()
    gap = fleet.operator.SubscribeKvEventsRequest(data_parallel_ranks=[0], start_sequence_number=10_000_000)
    (last,) = fleet.operator.subscribeKvEvents(gap)
    assert last.error.code == 1  # INVALID_ARGUMENT
    assert "rank 0" in last.error.message
