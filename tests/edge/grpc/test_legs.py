"""A caller that drives both phases itself: legs, the references between them, and whose they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge.core.errors import Code, EdgeError
from edge.core.life_events import Phase
from edge.core.seals import MEMBER, Seals
from edge.core.types import FinishReason
from enginelink.envelope import Key
from openengine.v1 import error_pb2, generation_pb2, kv_pb2, lifecycle_pb2
from tests.edge.grpc.harness import (
    Client,
    FrontEnd,
    events_of,
    front_end,
    ids_of,
    reference,
    request,
    text_of,
    until,
)
from tests.edge.http.harness import KEY, Script

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = {"request_type": "context_only"}


def prefilled(client: Client, prompt: str = "Hi") -> kv_pb2.KvSessionRef:
    (response,) = client.answer(request(prompt, extra=CONTEXT))
    assert response.WhichOneof("event") == "prefill_ready"
    return response.prefill_ready.kv_session


def generation(session: kv_pb2.KvSessionRef, prompt: str = "Hi", **fields: Any) -> generation_pb2.GenerateRequest:
    return request(prompt, kv=generation_pb2.KvOptions(session=session), **fields)


def abort(session: kv_pb2.KvSessionRef) -> lifecycle_pb2.AbortRequest:
    return lifecycle_pb2.AbortRequest(kv_session=session)


def test_a_context_leg_ends_with_a_sealed_reference_and_usage(edge: FrontEnd, client: Client) -> None:
    edge.worker.answer = lambda order: Script(cached_tokens=1)

    (response,) = client.answer(request(extra=CONTEXT))

    assert MEMBER in response.prefill_ready.kv_session.attributes_struct.fields
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (2, 1, 1)
    assert [order.phase for order in edge.worker.orders] == [Phase.CONTEXT]


def test_both_legs_give_the_answer_of_the_whole(edge: FrontEnd, client: Client) -> None:
    whole = client.answer(request())

    responses = client.answer(generation(prefilled(client)))

    assert ids_of(responses) == ids_of(whole)
    assert text_of(responses) == text_of(whole) == "Hello!"
    assert events_of(responses)[-1] == "finished"
    assert responses[-1].usage.completion_tokens == 6


def test_the_worker_gets_its_reference_back_byte_for_byte(edge: FrontEnd, client: Client) -> None:
    client.answer(generation(prefilled(client)))

    context, leg = edge.worker.orders
    assert leg.phase is Phase.GENERATION
    assert leg.kv_session == reference(f"{0:032x}", ord("H"))
    assert context.token_ids == leg.token_ids


def test_the_pages_are_let_go_once_they_were_fetched_and_the_conversation_is_told_of(
    edge: FrontEnd, client: Client
) -> None:
    session = prefilled(client)
    assert len(edge.driver.pins) == 1
    client.answer(generation(session))

    assert len(edge.driver.pins) == 0
    assert [told for _, told in edge.worker.told] == ["generating", FinishReason.STOP]
    assert edge.worker.cancelled == [edge.worker.orders[0].request_id]


def _altered(alter: Callable[[kv_pb2.KvSessionRef], object]) -> Callable[[kv_pb2.KvSessionRef], kv_pb2.KvSessionRef]:
    def altered(session: kv_pb2.KvSessionRef) -> kv_pb2.KvSessionRef:
        alter(session)
        return session

    return altered


FORGERIES = {
    "another host": _altered(lambda session: setattr(session.endpoints[0], "host", "evil.example")),
    "no seal": _altered(lambda session: session.attributes_struct.fields.pop(MEMBER)),
    "a worker's own": lambda session: kv_pb2.KvSessionRef.FromString(reference("0" * 32, 1)),
    "empty": lambda session: kv_pb2.KvSessionRef(),
    "other attributes": _altered(lambda session: session.attributes_struct.update({"ctx_dp_rank": 3})),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_reference_that_is_not_as_it_left_is_refused_and_nothing_is_dialled(
    edge: FrontEnd, client: Client, forge: Callable[[kv_pb2.KvSessionRef], kv_pb2.KvSessionRef]
) -> None:
    session = forge(prefilled(client))

    code, message = client.refused(generation(session))
    aborting = client.refused(abort(session), method="Abort")

    assert (code, aborting[0]) == (INVALID, INVALID)
    assert "kv.session" in message
    assert len(edge.worker.orders) == 1
    assert len(edge.driver.pins) == 1


def test_another_tenant_can_neither_use_nor_end_a_reference(edge: FrontEnd, client: Client, other: Client) -> None:
    session = prefilled(client)

    assert other.refused(generation(session))[0] == INVALID
    assert other.refused(abort(session), method="Abort")[0] == INVALID
    assert len(edge.worker.orders) == 1
    assert text_of(client.answer(generation(session))) == "Hello!"


def test_an_aborted_reference_frees_its_pages_and_is_gone(edge: FrontEnd, client: Client) -> None:
    session = prefilled(client)

    answer = client.ask("Abort", abort(session))

    assert answer.status == lifecycle_pb2.ABORT_STATUS_ABORTED
    assert edge.worker.cancelled == [edge.worker.orders[0].request_id]
    assert client.refused(abort(session), method="Abort")[0] == grpc.StatusCode.NOT_FOUND
    assert [told for _, told in edge.worker.told] == ["generating", None]


def test_the_reference_of_a_worker_that_is_gone_is_not_found(edge: FrontEnd, client: Client) -> None:
    session = prefilled(client)
    edge.driver.fleet.joined(edge.worker.worker_id, "another start", 512, 4)
    try:
        code, message = client.refused(generation(session))
    finally:
        edge.driver.fleet.joined(edge.worker.worker_id, "instance", 512, 4)

    assert code == grpc.StatusCode.NOT_FOUND
    assert "kv.session" in message


def test_a_generation_leg_whose_pages_are_gone_says_so(edge: FrontEnd, client: Client) -> None:
    session = prefilled(client)
    lost = EdgeError(Code.KV_TRANSFER_FAILED, "The pages could not be fetched.", retryable=True)
    edge.worker.answer = lambda order: Script("", error=lost)

    (response,) = client.answer(generation(session))

    assert response.error.code == error_pb2.ERROR_CODE_KV_TRANSFER_FAILED
    assert response.error.retryable
    # They may still be there for another try.
    assert len(edge.driver.pins) == 1


def test_a_generation_leg_that_is_aborted_before_its_pages_came_leaves_them(edge: FrontEnd, client: Client) -> None:
    session = prefilled(client)
    hold = threading.Event()
    edge.worker.answer = lambda order: Script(hold=hold)
    call = client.generate(generation(session, request_id="leg"))
    until(lambda: len(edge.worker.orders) == 2)

    client.ask("Abort", lifecycle_pb2.AbortRequest(request_id="leg"))
    (response,) = list(call)
    hold.set()

    assert response.error.code == error_pb2.ERROR_CODE_CANCELLED
    assert text_of(client.answer(generation(session))) == "Hello!"


def test_a_context_leg_whose_caller_hangs_up_is_ended(edge: FrontEnd, client: Client) -> None:
    hold = threading.Event()
    edge.worker.answer = lambda order: Script(hold=hold)
    call = client.generate(request(extra=CONTEXT))
    until(lambda: len(edge.worker.orders) == 1)

    call.cancel()

    until(lambda: len(edge.worker.cancelled) == 1)
    hold.set()
    assert len(edge.driver.pins) == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"extra": {"request_type": "generation_only"}}, "kv.session"),
        ({"extra": CONTEXT, "sampling": {"num_sequences": 2}}, "num_sequences"),
    ],
)
def test_a_leg_that_makes_no_sense_is_refused(client: Client, fields: dict[str, Any], named: str) -> None:
    code, message = client.refused(request(**fields))

    assert code == INVALID
    assert named in message


@pytest.mark.parametrize(
    "pairs",
    [
        [("x-kinroute-conversation-id", "c"), ("x-kinroute-parent-id", "p")],
        [("x-kinroute-conversation-id", "c"), ("x-kinroute-conversation-final", "true")],
        [("x-claude-code-session-id", "s"), ("x-claude-code-agent-id", "a")],
    ],
    ids=["parent", "final", "an agent's own"],
)
def test_a_hint_on_a_generation_leg_is_refused(client: Client, pairs: list[tuple[str, str]]) -> None:
    session = prefilled(client)

    code, message = client.refused(generation(session), pairs)

    assert code == INVALID
    assert "generation_only" in message


def test_the_rank_of_a_reference_counts(client: Client) -> None:
    session = prefilled(client)

    code, message = client.refused(generation(session), [("openengine-target-dp-rank", "1")])
    assert code == INVALID
    assert "dp_rank" in message
    assert text_of(client.answer(generation(session), [("openengine-target-dp-rank", "0")])) == "Hello!"


def test_without_a_key_that_seals_no_context_leg_is_served(text_folder: Path) -> None:
    with front_end(text_folder, seals=Seals(())) as edge, edge.client() as client:
        assert client.refused(request(extra=CONTEXT))[0] == grpc.StatusCode.UNIMPLEMENTED
        until(lambda: len(edge.driver.pins) == 0)


def test_two_edges_with_the_same_keys_open_each_others_references(text_folder: Path) -> None:
    def seals() -> Seals:
        return Seals((Key("shared", b"x" * 32),))

    with (
        front_end(text_folder, seals=seals()) as one,
        front_end(text_folder, seals=seals()) as two,
        one.client(KEY) as first,
        two.client(KEY) as second,
    ):
        session = prefilled(first)
        assert text_of(second.answer(generation(session))) == "Hello!"
        assert second.refused(abort(session), method="Abort")[0] == grpc.StatusCode.NOT_FOUND
