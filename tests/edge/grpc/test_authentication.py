"""Tokens of an issuer over gRPC: the same rules as over HTTP, and as little is said of why."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from openengine.v1 import server_pb2
from tests.edge.forged_tokens import by_url, forgeries
from tests.edge.grpc.harness import DEADLINE_S, Client, FrontEnd, front_end, request, text_of
from tests.edge.http.harness import KEY, Script
from tests.edge.issuer import FAMILIES, Issuer, issuer, jwk, token


@pytest.fixture(scope="module")
def published() -> Iterator[Issuer]:
    with issuer(*(jwk(kind, kind) for kind in FAMILIES)) as running:
        yield running


@pytest.fixture(scope="module")
def edge(text_folder: Path, published: Issuer) -> Iterator[FrontEnd]:
    with front_end(text_folder, jwt=by_url(published.url), jwks_interval_s=0.05) as running:
        yield running


def status(edge: FrontEnd, *metadata: tuple[str, str]) -> tuple[grpc.StatusCode, str | None]:
    with Client(edge.address) as client:
        try:
            client.control.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=DEADLINE_S, metadata=metadata)
        except grpc.RpcError as error:
            call: grpc.Call = error  # type: ignore[assignment]  # grpc raises the call
            return call.code(), call.details()
    return grpc.StatusCode.OK, ""


def bearer(credential: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {credential}")


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_token_of_every_family_lets_in(edge: FrontEnd, kind: str) -> None:
    assert status(edge, bearer(token(kind, kid=kind))) == (grpc.StatusCode.OK, "")


def test_a_token_in_either_key_says_whose_request_it_is(edge: FrontEnd) -> None:
    edge.worker.answer = lambda order: Script()
    for name, form in (("authorization", "Bearer {}"), ("x-api-key", "{}")):
        edge.worker.orders.clear()
        with Client(edge.address) as client:
            metadata = [(name, form.format(token("ES256", kid="ES256", tenant="globex")))]
            answers = list(client.inference.Generate(request(), timeout=DEADLINE_S, metadata=metadata))
        assert text_of(answers) == "Hello!"
        assert [order.tenant for order in edge.worker.orders] == ["globex"]


def test_every_refusal_has_the_same_words(edge: FrontEnd) -> None:
    plain = status(edge, bearer("kr-unknown"))

    assert plain[0] is grpc.StatusCode.UNAUTHENTICATED
    assert {what: status(edge, bearer(forged)) for what, (forged, _) in forgeries().items()} == dict.fromkeys(
        forgeries(), plain
    )
    assert status(edge) == plain
    assert status(edge, bearer(KEY), ("x-api-key", "kr-other")) == plain


def test_no_header_of_a_token_makes_the_edge_call_anybody(edge: FrontEnd) -> None:
    with issuer(jwk("RS256", "trap", number=7)) as trap:
        for name in ("jku", "x5u"):
            forged = token("RS256", kid="trap", number=7, headers={name: trap.url})
            assert status(edge, bearer(forged))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert trap.asked == []


def test_a_key_that_was_just_published_lets_in_at_once_and_one_that_is_gone_does_not(text_folder: Path) -> None:
    with (
        issuer(jwk("RS256", "old")) as keys,
        front_end(text_folder, jwt=by_url(keys.url), jwks_interval_s=0.05) as edge,
    ):
        assert status(edge, bearer(token(kid="old")))[0] is grpc.StatusCode.OK
        keys.publish(jwk("ES256", "new"))
        assert status(edge, bearer(token("ES256", kid="new")))[0] is grpc.StatusCode.OK
        assert status(edge, bearer(token(kid="old")))[0] is grpc.StatusCode.UNAUTHENTICATED


def test_many_unknown_key_ids_hold_nobody_up(text_folder: Path) -> None:
    with (
        issuer(jwk("RS256", "k")) as keys,
        front_end(text_folder, jwt=by_url(keys.url), jwks_interval_s=1.0) as edge,
    ):
        assert status(edge, bearer(token(kid="k")))[0] is grpc.StatusCode.OK
        began_s = time.monotonic()
        codes: list[grpc.StatusCode] = []
        flood = [
            threading.Thread(target=lambda kid=f"k{n}": codes.append(status(edge, bearer(token(kid=kid)))[0]))
            for n in range(40)
        ]
        for thread in flood:
            thread.start()
        for _ in range(10):
            assert status(edge, bearer(token(kid="k")))[0] is grpc.StatusCode.OK
        for thread in flood:
            thread.join(DEADLINE_S)

        assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 40
        assert len(keys.asked) <= 2 + (time.monotonic() - began_s)
