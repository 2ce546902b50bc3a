"""Generate over a real connection: answers, their last events, and what ends them."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from edge.core.errors import Code, EdgeError
from edge.core.life_events import Phase
from edge.core.types import FinishReason
from openengine.v1 import error_pb2, generation_pb2
from tests.edge.grpc.harness import Client, FrontEnd, events_of, ids_of, request, text_of, until
from tests.edge.http.harness import Script

STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH
END = 258  # <|im_end|>, after 256 bytes and two special tokens


def test_an_answer_ends_with_one_finished_that_alone_carries_usage(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("Hello!", cached_tokens=1)

    responses = client.answer(request("Hi there", 4))

    *tokens, last = responses
    assert set(events_of(tokens)) == {"token"}
    assert all(one.token.HasField("output_index") and not one.HasField("usage") for one in tokens)
    assert text_of(responses) == "Hell"
    assert ids_of(responses) == list(b"Hell")
    assert last.finished.HasField("output_index")
    assert last.finished.reason == LENGTH
    assert {one.request_id for one in responses} == {last.request_id}
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 4, 12)
    assert usage.cached_prompt_tokens == 1


def test_token_ids_and_text_are_the_same_prompt(edge: FrontEnd, client: Client) -> None:
    assert text_of(client.answer(request("Hi"))) == text_of(client.answer(request(list(b"Hi")))) == "Hello!"
    assert edge.worker.orders[0].token_ids == edge.worker.orders[1].token_ids
    assert edge.worker.orders[0].phase is Phase.AGGREGATED


def test_the_token_that_stops_an_answer_is_named_and_no_part_of_it(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script(b"Yes!", FinishReason.STOP)

    stop = generation_pb2.StoppingOptions(conditions=[generation_pb2.StopCondition(stop_token_id=ord("!"))])
    responses = client.answer(request(stopping=stop))

    assert text_of(responses) == "Yes"
    assert responses[-1].finished.reason == STOP
    assert responses[-1].finished.stop_match.stop_token_id == ord("!")
    assert responses[-1].usage.completion_tokens == 4
    assert edge.worker.orders[0].stops.stop_token_ids == (ord("!"),)


def test_a_token_that_might_have_stopped_it_comes_with_the_next(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script(b"a!b", FinishReason.LENGTH)

    stop = generation_pb2.StoppingOptions(conditions=[generation_pb2.StopCondition(stop_token_id=ord("!"))])

    assert text_of(client.answer(request(stopping=stop))) == "a!b"


def test_a_stop_text_ends_the_answer_before_it_across_tokens(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("one two three four")

    conditions = [generation_pb2.StopCondition(stop_text=text) for text in ("absent", "o th")]
    responses = client.answer(request(stopping=generation_pb2.StoppingOptions(conditions=conditions)))

    assert text_of(responses) == "one tw"
    assert responses[-1].finished.stop_match.stop_text == "o th"
    until(lambda: bool(edge.worker.cancelled))


def test_what_might_have_become_a_stop_text_comes_at_the_end(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("wait fo")
    stops = generation_pb2.StoppingOptions(conditions=[generation_pb2.StopCondition(stop_text="for")])

    responses = client.answer(request(stopping=stops))

    assert text_of(responses) == "wait fo"


def test_log_probabilities_come_with_ranks_and_candidates(client: Client) -> None:
    top = generation_pb2.ResponseOptions(output_candidates=generation_pb2.CandidateTokenSelection(top_n=2))

    token = client.answer(request(response=top))[0].token.tokens[0]
    plain = client.answer(request())[0].token.tokens[0]

    assert (token.token_id, token.token, token.logprob, token.rank) == (ord("H"), "H", -0.5, 1)
    assert [(one.token_id, one.logprob, one.rank) for one in token.candidates] == [
        (ord("H"), -0.5, 1),
        (ord("I"), -1.5, 2),
    ]
    assert not plain.HasField("logprob")


def test_several_outputs_each_end_once_and_usage_counts_them_all(edge: FrontEnd, client: Client) -> None:
    sampling = generation_pb2.SamplingParams(num_sequences=3, seed=2**64 - 1)

    responses = client.answer(request("Hi", sampling=sampling))

    for index in range(3):
        own = [one for one in responses if (one.token if one.HasField("token") else one.finished).output_index == index]
        assert text_of(own) == "Hello!"
        assert events_of(own).count("finished") == 1
        assert events_of(own)[-1] == "finished"
    assert [one.HasField("usage") for one in responses] == [False] * (len(responses) - 1) + [True]
    assert (responses[-1].usage.prompt_tokens, responses[-1].usage.completion_tokens) == (2, 18)
    assert [order.sampling.seed for order in edge.worker.orders] == [2**64 - 1, 0, 1]


def test_a_failure_after_acceptance_is_one_error_and_ok(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("Hel", error=EdgeError(Code.WORKER_FAILED, "A worker failed."))

    responses = client.answer(request())

    assert text_of(responses) == "Hel"
    assert events_of(responses).count("error") == 1
    assert responses[-1].error.code == error_pb2.ERROR_CODE_INTERNAL
    assert responses[-1].usage.completion_tokens == 3


def test_what_a_worker_turns_away_before_it_began_is_a_status(edge: FrontEnd, client: Client) -> None:
    refusal = EdgeError(Code.INVALID, "token_ids: too many for it")
    edge.worker.answer = lambda order: Script("", error=refusal)

    assert client.refused(request()) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids: too many for it")


def test_without_a_ready_worker_a_request_may_come_again_later(edge: FrontEnd, client: Client) -> None:
    edge.driver.fleet.lost(edge.worker.worker_id)
    try:
        code, message = client.refused(request())
    finally:
        edge.driver.fleet.joined(edge.worker.worker_id, "instance", 512, 4)

    assert code == grpc.StatusCode.UNAVAILABLE
    assert "ready" in message


def test_a_caller_that_hangs_up_ends_its_turn(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("Hello" * 1000, step_s=0.01)
    call = client.generate(request(max_tokens=500))
    next(call)

    call.cancel()

    until(lambda: bool(edge.worker.cancelled))
    edge.settle()


def test_a_request_id_is_refused_while_its_tenant_has_it_running(edge: FrontEnd, client: Client, other: Client) -> None:
    hold = threading.Event()
    edge.worker.answer = lambda order: Script(hold=hold)
    first = client.generate(request(request_id="same"))
    until(lambda: len(edge.worker.orders) == 1)

    assert client.refused(request(request_id="same"))[0] == grpc.StatusCode.ALREADY_EXISTS
    elsewhere = other.generate(request(request_id="same"))
    until(lambda: len(edge.worker.orders) == 2)
    hold.set()

    assert text_of(list(first)) == text_of(list(elsewhere)) == "Hello!"
    assert text_of(client.answer(request(request_id="same"))) == "Hello!"
    assert len({order.request_id for order in edge.worker.orders}) == 3


def test_the_answer_of_a_caller_that_does_not_read_ends(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script("x" * 100_000, step_s=0.0)
    edge.driver.fleet.joined(edge.worker.worker_id, "instance", 100_000, 4)
    slow_before = edge.parts.metrics.slow_clients
    top = generation_pb2.ResponseOptions(output_candidates=generation_pb2.CandidateTokenSelection(top_n=20))
    try:
        call = client.generate(request(max_tokens=90_000, response=top))
        next(call)
        until(lambda: bool(edge.worker.cancelled))
        code, last = _end_of(call)
    finally:
        edge.driver.fleet.joined(edge.worker.worker_id, "instance", 512, 4)

    # Where there was room for it, an event; else a status.
    if code is grpc.StatusCode.OK:
        assert last.error.code == error_pb2.ERROR_CODE_OVERLOADED
    else:
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    until(lambda: edge.parts.metrics.slow_clients == slow_before + 1)


def _end_of(call: Any) -> tuple[grpc.StatusCode, Any]:
    responses = []
    try:
        for response in call:
            responses.append(response)  # noqa: PERF402 - those before a failure count
    except grpc.RpcError:
        return call.code(), None
    return grpc.StatusCode.OK, responses[-1]
