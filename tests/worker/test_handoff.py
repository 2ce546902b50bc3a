"""Two workers: one prefills, the other pulls its pages and goes on as if it had prefilled itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, generation_pb2, kv_pb2, lifecycle_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import (
    Edge,
    OpenEngine,
    generate_request,
    kinds,
    link_tokens,
    session_of,
    status_of,
    token_ids,
)
from tests.worker.running import Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
CONTEXT = {"extra": {"request_type": "context_only"}}


@dataclass(frozen=True)
class Pair:
    context: Running
    generation: Running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads: two ranks hold two and one."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with (
        worker(folder, model, "context", role="context", tensor_parallel_size=2) as context,
        worker(folder, model, "generation", role="generation") as generation,
    ):
        context.wait_for("ready")
        generation.wait_for("ready")
        yield Pair(context, generation)


@pytest.fixture(autouse=True)
def nothing_is_left(pair: Pair) -> Iterator[None]:
    yield
    pair.context.wait_clean()
    pair.generation.wait_clean()


def whole(pair: Pair, prompt: list[int], tokens: int) -> list[int]:
    """The answer of one worker alone."""
    with OpenEngine(pair.generation.grpc) as generation:
        options = generation_pb2.KvOptions(bypass_prefix_cache=True)
        return token_ids(generation.answer(generate_request(prompt, tokens, kv=options)))


def altered(session: kv_pb2.KvSessionRef, **members: Any) -> kv_pb2.KvSessionRef:
    """A copy with other values in our part of its attributes."""
    copy = kv_pb2.KvSessionRef.FromString(session.SerializeToString())
    copy.attributes_struct.fields["kinroute"].struct_value.update(members)
    return copy


def test_the_generation_worker_goes_on_where_the_context_worker_stopped(pair: Pair) -> None:
    prompt = list(range(10, 73))
    with OpenEngine(pair.context.grpc) as context, OpenEngine(pair.generation.grpc) as generation:
        ready = context.answer(generate_request(prompt, 8, **CONTEXT))
        session = session_of(ready)
        answer = generation.answer(generate_request(prompt, 8, kv=generation_pb2.KvOptions(session=session)))

    assert token_ids(answer) == whole(pair, prompt, 8)
    assert (answer[-1].usage.prompt_tokens, answer[-1].usage.completion_tokens) == (63, 8)
    assert ready[-1].usage.completion_tokens == 1


def test_a_second_handover_pulls_only_what_the_generation_worker_lacks(pair: Pair) -> None:
    first, second = list(range(100, 130)), list(range(100, 150))
    with OpenEngine(pair.context.grpc) as context, OpenEngine(pair.generation.grpc) as generation:
        for prompt in (first, second):
            session = session_of(context.answer(generate_request(prompt, 4, **CONTEXT)))
            kv = generation_pb2.KvOptions(session=session)
            answer = generation.answer(generate_request(prompt, 4, kv=kv))

    assert token_ids(answer) == whole(pair, second, 4)
    assert answer[-1].usage.cached_prompt_tokens == 28


def test_over_links_the_first_token_comes_with_the_session_and_only_there(pair: Pair) -> None:
    prompt = list(range(20, 61))
    with Edge(pair.context.grpc) as context, Edge(pair.generation.grpc) as generation:
        ready = context.events(context.submit(prompt, link_pb2.PHASE_CONTEXT, 6), last=["prefill_ready"])
        session = ready[-1].prefill_ready.kv_session
        events = generation.events(generation.submit(prompt, link_pb2.PHASE_GENERATION, 6, kv_session=session))

    assert kinds(ready) == ["started", "prefill_ready"]
    assert kinds(events) == ["started", "kv_arrived", *["token"] * 5, "finished"]
    first = ready[-1].prefill_ready.first_token.token_id
    assert [first, *link_tokens(events)] == whole(pair, prompt, 6)
    assert events[-1].finished.usage.completion_tokens == 6


def test_a_context_leg_whose_first_token_is_its_last_ends_there(pair: Pair) -> None:
    with Edge(pair.context.grpc) as context:
        events = context.events(context.submit([1, 2, 3], link_pb2.PHASE_CONTEXT, 1))

    assert kinds(events) == ["started", "token", "finished"]


def test_a_pin_ends_when_its_edge_cancels_it(pair: Pair) -> None:
    with Edge(pair.context.grpc) as context:
        handle = context.submit([1, 2, 3, 4, 5], link_pb2.PHASE_CONTEXT, 6)
        context.events(handle, last=["prefill_ready"])
        assert pair.context.leaks()["pins"] == 1

        context.cancel(handle)

        pair.context.wait_clean()


def test_a_pin_ends_when_its_session_is_aborted_and_a_late_pull_fails_as_retryable(pair: Pair) -> None:
    prompt = [9, 8, 7, 6, 5, 4]
    with OpenEngine(pair.context.grpc) as context, OpenEngine(pair.generation.grpc) as generation:
        session = session_of(context.answer(generate_request(prompt, 4, **CONTEXT)))
        context.control.Abort(lifecycle_pb2.AbortRequest(kv_session=session))
        pair.context.wait_clean()

        last = generation.answer(generate_request(prompt, 4, kv=generation_pb2.KvOptions(session=session)))[-1]

    assert last.error.code == error_pb2.ERROR_CODE_KV_TRANSFER_FAILED
    assert last.error.retryable


def test_a_session_is_worth_nothing_without_its_secret(pair: Pair) -> None:
    prompt = [5, 5, 5, 6, 6, 6]
    with OpenEngine(pair.context.grpc) as context, OpenEngine(pair.generation.grpc) as generation:
        session = session_of(context.answer(generate_request(prompt, 4, **CONTEXT)))
        forged = altered(session, secret="0" * 64)

        last = generation.answer(generate_request(prompt, 4, kv=generation_pb2.KvOptions(session=forged)))[-1]
        good = generation.answer(generate_request(prompt, 4, kv=generation_pb2.KvOptions(session=session)))

    assert last.error.code == error_pb2.ERROR_CODE_KV_TRANSFER_FAILED
    assert token_ids(good) == whole(pair, prompt, 4)


@pytest.mark.parametrize(
    ("member", "value", "named"),
    [
        ("tokens_per_block", 8, "tokens_per_block"),
        ("prompt_tokens", 5, "prompt_tokens"),
        ("dtype", "bfloat16", "dtype"),
    ],
)
def test_a_session_that_does_not_fit_is_refused_before_acceptance(
    pair: Pair, member: str, value: Any, named: str
) -> None:
    prompt = [3, 1, 4, 1, 5, 9]
    with OpenEngine(pair.context.grpc) as context, OpenEngine(pair.generation.grpc) as generation:
        session = session_of(context.answer(generate_request(prompt, 4, **CONTEXT)))
        wrong = altered(session, **{member: value})

        with pytest.raises(grpc.RpcError) as caught:
            generation.answer(generate_request(prompt, 4, kv=generation_pb2.KvOptions(session=wrong)))
        context.control.Abort(lifecycle_pb2.AbortRequest(kv_session=session))

    code, message = status_of(caught)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert named in message


def test_an_address_outside_of_the_allowed_networks_is_never_dialled(pair: Pair) -> None:
    prompt = [2, 7, 1, 8, 2, 8]
    with OpenEngine(pair.context.grpc) as context, OpenEngine(pair.generation.grpc) as generation:
        session = session_of(context.answer(generate_request(prompt, 4, **CONTEXT)))
        for endpoint in session.endpoints:
            endpoint.host = "192.0.2.1"

        with pytest.raises(grpc.RpcError) as caught:
            generation.answer(generate_request(prompt, 4, kv=generation_pb2.KvOptions(session=session)))
        context.control.Abort(lifecycle_pb2.AbortRequest(kv_session=session))

    assert status_of(caught) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "kv.session: 192.0.2.1 is not in kv_transfer.allowed_networks",
    )


def test_a_phase_that_is_not_the_workers_is_refused(pair: Pair) -> None:
    with OpenEngine(pair.context.grpc) as context, pytest.raises(grpc.RpcError) as caught:
        context.answer(generate_request([1], 4, extra={"request_type": "context_and_generation"}))

    assert status_of(caught)[0] == grpc.StatusCode.FAILED_PRECONDITION


def test_a_transfer_that_nobody_fetches_expires(tmp_path: Path, model: Path) -> None:
    transfer = {"handoff_timeout_s": 0.3}
    with worker(tmp_path, model, role="context", kv_transfer=transfer) as running:
        running.wait_for("ready")
        with OpenEngine(running.grpc) as context:
            session_of(context.answer(generate_request([1, 2, 3], 4, **CONTEXT)))

        running.wait_clean()
