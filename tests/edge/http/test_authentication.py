"""Tokens of an issuer over the wire: who is let in, what is refused, and what no token makes the edge do."""

from __future__ import annotations

import gzip
import hmac
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import jwt
import pytest

from bench.certificates import Authority
from edge.core.types import Scope
from edge.trust_settings import Claims, Jwt
from tests.edge.forged_tokens import by_url, forgeries
from tests.edge.http.harness import Served, served
from tests.edge.issuer import (
    AUDIENCE,
    FAMILIES,
    SECRET,
    Answer,
    Issuer,
    issuer,
    jwk,
    jwks,
    pem,
    private_key,
    raw_token,
    token,
)

WAIT_S = 20.0


def ask(edge: Served, credential: str) -> httpx.Response:
    return httpx.get(f"{edge.url}/v1/models", headers={"authorization": f"Bearer {credential}"}, timeout=WAIT_S)


def lets_in(edge: Served, credential: str) -> bool:
    return ask(edge, credential).status_code == 200


def wait_until_refused(edge: Served, credential: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while lets_in(edge, credential):
        assert time.monotonic() < end_s, "it is still let in"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def published() -> Iterator[Issuer]:
    """One key of every kind, named as the kind."""
    with issuer(*(jwk(kind, kind) for kind in FAMILIES)) as running:
        yield running


@pytest.fixture(scope="module")
def edge(text_folder: Path, published: Issuer) -> Iterator[Served]:
    with served(text_folder, jwt=by_url(published.url), jwks_interval_s=0.05) as running:
        assert lets_in(running, token("RS256", kid="RS256"))
        yield running


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_token_of_every_family_lets_in(edge: Served, kind: str) -> None:
    assert lets_in(edge, token(kind, kid=kind))


def test_what_is_wrong_with_a_token_is_told_to_the_audit_alone(edge: Served) -> None:
    plain = ask(edge, "kr-unknown")
    named = {"x-request-id", "date"}
    reasons: Counter[str] = Counter()
    before = {reason: edge.refused("credential", reason) for _, reason in forgeries().values()}
    for what, (credential, reason) in forgeries().items():
        answer = ask(edge, credential)
        reasons[reason] += 1

        assert answer.status_code == 401, what
        assert answer.content == plain.content, what
        assert {name: answer.headers[name] for name in answer.headers if name not in named} == {
            name: plain.headers[name] for name in plain.headers if name not in named
        }, what
    assert {reason: edge.refused("credential", reason) - before[reason] for reason in reasons} == reasons


def test_no_header_of_a_token_makes_the_edge_call_anybody(edge: Served) -> None:
    with issuer(jwk("RS256", "trap", number=7)) as trap:
        for name in ("jku", "x5u"):
            for kid in ("trap", "RS256", trap.url):
                assert not lets_in(edge, token("RS256", kid=kid, number=7, headers={name: trap.url}))
        assert not lets_in(edge, token("RS256", kid="RS256", number=7, headers={"x5c": ["MIIB"]}))

        assert trap.asked == []


def test_a_public_key_is_no_secret_even_beside_one(text_folder: Path, tmp_path: Path) -> None:
    """The file has an RSA key and a secret, and both families are allowed: each key serves its own."""
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks(jwk("RS256", "rsa"), jwk("HS256", "oct")))
    settings = Jwt(jwks_file=file, algorithms=("RS256", "HS256"), audience=AUDIENCE)
    claims = {"aud": AUDIENCE, "sub": "ann", "exp": time.time() + 60}
    with served(text_folder, jwt=settings) as edge:
        assert lets_in(edge, token("RS256", kid="rsa"))
        assert lets_in(edge, token("HS256", kid="oct"))
        for key in (pem("RS256"), pem("RS256").strip(), json.dumps(jwk("RS256")).encode()):
            for kid in ("rsa", "oct", None):
                header = {"alg": "HS256"} if kid is None else {"alg": "HS256", "kid": kid}
                unsigned = raw_token(header, claims).rpartition(".")[0]
                mac = hmac.digest(key, unsigned.encode(), "sha256")
                assert not lets_in(edge, raw_token(header, claims, mac))
        assert not lets_in(edge, token("RS256", kid="oct"))
        assert not lets_in(edge, token("HS256", kid="rsa"))


def test_claims_are_read_where_the_configuration_says(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    settings = Jwt(
        secret_file=tmp_path / "secret",
        claims=Claims(tenant="org.name", subject="oid", scopes=("realm_access.roles", "scp"), limits="kinroute"),
        scope_map={"agents": Scope.AFFINITY},
        audience=AUDIENCE,
    )
    credential = token(
        "HS256", org={"name": "acme"}, oid="o1", realm_access={"roles": ["agents"]}, kinroute={"requests": 1}
    )
    headers = {
        "authorization": f"Bearer {credential}",
        "x-kinroute-conversation-id": "c",
        "x-kinroute-parent-id": "p",
    }
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
    with served(text_folder, jwt=settings) as edge:
        answer = httpx.post(f"{edge.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        [order] = edge.worker.orders
        assert (order.tenant, bool(order.lineage.parent)) == ("acme", True)

        headers["authorization"] = f"Bearer {token('HS256', org={'name': 'acme'}, oid='o1', scp='affinity')}"
        assert httpx.post(f"{edge.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S).status_code == 403


def test_many_unknown_key_ids_are_one_fetch_in_an_interval_and_hold_nobody_up(text_folder: Path) -> None:
    with issuer(jwk("RS256", "k")) as keys, served(text_folder, jwt=by_url(keys.url), jwks_interval_s=2.0) as edge:
        assert lets_in(edge, token(kid="k"))
        began_s = time.monotonic()
        statuses: list[int] = []
        flood = [
            threading.Thread(target=lambda: statuses.append(ask(edge, token(kid=secrets.token_hex(8))).status_code))
            for _ in range(80)
        ]
        for thread in flood:
            thread.start()
        for _ in range(20):
            assert lets_in(edge, token(kid="k")), "who has a known key does not wait"
        for thread in flood:
            thread.join(WAIT_S)

        assert set(statuses) <= {401, 503}, "some wait for the next fetch, further ones are told to come again"
        assert statuses.count(401) >= 64
        assert len(keys.asked) <= 2 + (time.monotonic() - began_s) / 2.0


def test_a_key_that_is_published_lets_in_at_once_and_one_that_is_withdrawn_soon_no_more(text_folder: Path) -> None:
    with issuer(jwk("RS256", "old")) as keys, served(text_folder, jwt=by_url(keys.url), jwks_interval_s=0.05) as edge:
        assert lets_in(edge, token(kid="old"))
        keys.publish(jwk("RS256", "old"), jwk("ES256", "new"))
        assert lets_in(edge, token("ES256", kid="new")), "its first token waits for the key"
        assert lets_in(edge, token(kid="old"))

        seen = token(kid="old")
        assert lets_in(edge, seen)
        keys.publish(jwk("ES256", "new"))
        assert not lets_in(edge, token("RS256", kid="newer")), "which fetches"
        wait_until_refused(edge, seen)
        assert lets_in(edge, token("ES256", kid="new"))


def test_a_key_that_is_used_before_it_is_published_lets_in_once_it_is(text_folder: Path) -> None:
    with issuer(jwk("RS256", "old")) as keys, served(text_folder, jwt=by_url(keys.url), jwks_interval_s=0.05) as edge:
        early = token("ES256", kid="new")
        assert not lets_in(edge, early)
        keys.publish(jwk("RS256", "old"), jwk("ES256", "new"))
        end_s = time.monotonic() + WAIT_S
        while not lets_in(edge, early):
            assert time.monotonic() < end_s, "that it was not there is remembered for good"
            time.sleep(0.02)


def test_a_rotation_fails_no_request(text_folder: Path) -> None:
    with issuer(jwk("ES256", "k0")) as keys, served(text_folder, jwt=by_url(keys.url), jwks_interval_s=0.05) as edge:
        published = ["k0"]
        statuses: list[int] = []
        ended = threading.Event()

        def load() -> None:
            with httpx.Client(base_url=edge.url, timeout=WAIT_S) as client:
                while not ended.is_set():
                    credential = token("ES256", kid=published[-1], number=int(published[-1][1:]))
                    answer = client.get("/v1/models", headers={"x-api-key": credential})
                    statuses.append(answer.status_code)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(1, 6):
            keys.publish(jwk("ES256", f"k{number - 1}", number - 1), jwk("ES256", f"k{number}", number))
            published.append(f"k{number}")
            done = len(statuses)
            end_s = time.monotonic() + WAIT_S
            while len(statuses) < done + 40:
                assert time.monotonic() < end_s, "nothing is answered"
                time.sleep(0.005)
        ended.set()
        for thread in threads:
            thread.join(WAIT_S)

        assert set(statuses) == {200}


BAD_ANSWERS = {
    "it fails": Answer(status=500),
    "it redirects": Answer(status=302, headers={"location": "/elsewhere"}),
    "it redirects for good": Answer(status=308, headers={"location": "/elsewhere"}),
    "it is too long": Answer(b" " * (1 << 20) + jwks(jwk("RS256", "new"))),
    "it is no JSON": Answer(b"<html>"),
    "it is nested beyond all bounds": Answer(b"[" * 500_000),
    "it holds no key": Answer(jwks()),
    "it holds too many": Answer(jwks(*({"kty": "oct", "k": "AA"} for _ in range(101)))),
    "it holds weak keys alone": Answer(jwks(jwk("weak", "new"))),
    "it publishes its secret": Answer(jwks(jwk("HS256", "new"))),
    "it is packed": Answer(gzip.compress(jwks(jwk("RS256", "new"))), headers={"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("what", BAD_ANSWERS)
def test_an_issuer_that_answers_nonsense_takes_no_key_away_and_gives_none(text_folder: Path, what: str) -> None:
    with issuer(jwk("RS256", "old")) as keys, served(text_folder, jwt=by_url(keys.url), jwks_interval_s=0.05) as edge:
        assert lets_in(edge, token(kid="old"))
        keys.answer = lambda path: BAD_ANSWERS[what] if path == "/keys" else Answer(jwks(jwk("RS256", "new")))
        assert not lets_in(edge, token(kid="new"))

        assert "/elsewhere" not in keys.asked
        assert lets_in(edge, token(kid="old"))


def test_an_issuer_that_is_slow_holds_up_only_who_has_a_new_key(text_folder: Path) -> None:
    with issuer(jwk("RS256", "old")) as keys, served(text_folder, jwt=by_url(keys.url), jwks_interval_s=0.05) as edge:
        assert lets_in(edge, token(kid="old"))
        slow = Answer(jwks(jwk("RS256", "old"), jwk("ES256", "new")), wait=threading.Event())
        keys.answer = lambda path: slow
        statuses: list[int] = []
        waiting = threading.Thread(target=lambda: statuses.append(ask(edge, token("ES256", kid="new")).status_code))
        waiting.start()
        keys.wait_asked(2)
        assert lets_in(edge, token(kid="old"))
        assert statuses == []
        assert slow.wait is not None
        slow.wait.set()
        waiting.join(WAIT_S)

        assert statuses == [200]


def test_without_any_key_tokens_are_to_come_again_and_api_keys_are_served(text_folder: Path) -> None:
    with issuer() as keys:
        keys.fail()
        with served(text_folder, jwt=by_url(keys.url), jwks_interval_s=0.05) as edge:
            for _ in range(2):
                answer = ask(edge, token(kid="k"))
                assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
                assert int(answer.headers["retry-after"]) >= 1
            assert lets_in(edge, "kr-test")
            keys.publish(jwk("RS256", "k"))
            end_s = time.monotonic() + WAIT_S
            while not lets_in(edge, token(kid="k")):
                assert time.monotonic() < end_s, "it never comes back"


def test_keys_of_an_issuer_that_is_down_are_kept_for_their_while_and_no_longer(text_folder: Path) -> None:
    with issuer(jwk("RS256", "k")) as keys:
        kept = by_url(keys.url, keep_stale_s=3600)
        with served(text_folder, jwt=kept, jwks_interval_s=0.02) as edge:
            assert lets_in(edge, token(kid="k"))
            keys.fail()
            assert not lets_in(edge, token(kid="other"))
            keys.wait_asked(len(keys.asked) + 3)
            assert lets_in(edge, token(kid="k"))
        keys.publish(jwk("RS256", "k"))
        with served(text_folder, jwt=by_url(keys.url, keep_stale_s=0), jwks_interval_s=0.02) as edge:
            seen = token(kid="k")
            assert lets_in(edge, seen)
            keys.fail()
            assert not lets_in(edge, token(kid="other"))
            wait_until_refused(edge, seen)
            assert ask(edge, seen).status_code == 503


def test_an_issuer_over_tls_is_believed_where_its_authority_is_named(text_folder: Path, tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    issued = ours.issue("issuer")
    with issuer(jwk("RS256", "k"), certificate=Path(issued.certificate_file), key=Path(issued.key_file)) as keys:
        for authority, status in ((ours.file, 200), (other.file, 503), (None, 503)):
            with served(text_folder, jwt=by_url(keys.url, ca_file=authority), jwks_interval_s=0.05) as edge:
                assert ask(edge, token(kid="k")).status_code == status


def test_a_key_file_is_read_again_when_it_changes(text_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.pem"
    file.write_bytes(pem("ES256"))
    settings = Jwt(public_key_file=file, algorithms=("ES256",))
    with served(text_folder, jwt=settings) as edge:
        old, new = token("ES256"), token("ES256", number=1)
        assert (lets_in(edge, old), lets_in(edge, new)) == (True, False)
        file.write_bytes(b"-----BEGIN")
        file.write_bytes(pem("ES256", 1))
        wait_until_refused(edge, old)
        assert lets_in(edge, new)


def test_a_token_with_every_claim_at_its_bound_is_read_as_pyjwt_reads_it(edge: Served) -> None:
    credential = token("PS384", kid="PS384", sub="s" * 256, jti="j", iat=time.time())
    public = private_key("PS384").public_key()

    assert jwt.decode(credential, public, ["PS384"], audience=AUDIENCE)["sub"] == "s" * 256
    assert lets_in(edge, credential)
    assert not lets_in(edge, token("PS384", kid="PS384", sub="s" * 257))
