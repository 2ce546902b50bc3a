"""Who is let in, and for how long."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import jwt
import pytest

from edge.core.auth import MAX_CREDENTIAL_BYTES, MAX_SEEN, Authenticator, JwtRules
from edge.core.errors import Code, EdgeError
from edge.core.types import Principal

SECRET = b"s" * 64
KEY = "kr-right"
ALICE = Principal("acme", "alice", frozenset({"affinity"}), "k1")
NOW_S = 1_000_000.0


def digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()


def authenticator(**rules: Any) -> Authenticator:
    return Authenticator({digest(KEY): ALICE}, JwtRules(SECRET, **rules))


def token(*, secret: bytes = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    return jwt.encode({"sub": "bob", "exp": NOW_S + 60, **claims}, secret, algorithm)


def by_bearer(gate: Authenticator, credential: str, now_s: float = NOW_S) -> Principal:
    return gate.authenticate(f"Bearer {credential}", None, now_s)


def refuses(gate: Authenticator, authorization: str | None, x_api_key: str | None = None, now_s: float = NOW_S) -> str:
    with pytest.raises(EdgeError) as caught:
        gate.authenticate(authorization, x_api_key, now_s)
    assert caught.value.code is Code.UNAUTHENTICATED
    return caught.value.message


def test_a_key_is_known_by_its_hash_in_either_header() -> None:
    gate = authenticator()

    assert gate.authenticate(f"Bearer {KEY}", None, NOW_S) is ALICE
    assert gate.authenticate(f"bearer  {KEY} ", None, NOW_S) is ALICE
    assert gate.authenticate(None, KEY, NOW_S) is ALICE
    assert gate.authenticate(f"Bearer {KEY}", KEY, NOW_S) is ALICE


@pytest.mark.parametrize("credential", ["kr-wrong", digest(KEY), KEY + " x", KEY.upper(), f"{KEY}\nBearer {KEY}", "é"])
def test_any_other_key_is_refused_and_told_nothing(credential: str) -> None:
    assert refuses(authenticator(), f"Bearer {credential}") == "This API key is not known."


def test_a_key_whose_hash_only_starts_alike_is_another_key() -> None:
    near = digest(KEY)[:8] + "0" * 56
    gate = Authenticator({near: Principal("other", "other", frozenset()), digest(KEY): ALICE})

    assert by_bearer(gate, KEY) is ALICE
    assert refuses(Authenticator({near: ALICE}), f"Bearer {KEY}")


@pytest.mark.parametrize("authorization", ["Basic abc", "Bearer", "Bearer ", KEY])
def test_only_bearer_credentials_are_taken(authorization: str) -> None:
    assert "Bearer KEY" in refuses(authenticator(), authorization)


def test_two_different_credentials_are_none() -> None:
    assert "differ" in refuses(authenticator(), f"Bearer {KEY}", "kr-other")


def test_nobody_is_anonymous_unless_it_is_said_who_that_is() -> None:
    nobody = Principal("default", "anonymous", frozenset())

    assert refuses(authenticator(), None, "") == "No API key: send one as Authorization: Bearer KEY."
    assert Authenticator({}, anonymous=nobody).authenticate(None, None, NOW_S) is nobody
    assert refuses(Authenticator({}, anonymous=nobody), "Bearer kr-wrong")


def test_a_token_says_who_calls() -> None:
    believed = by_bearer(authenticator(), token(tenant="acme", scope="affinity operator"))

    assert believed == Principal("acme", "bob", frozenset({"affinity", "operator"}), "jwt")
    assert by_bearer(authenticator(), token(scope=["affinity", 7])).scopes == frozenset({"affinity"})
    assert by_bearer(authenticator(), token()) == Principal("default", "bob", frozenset(), "jwt")


@pytest.mark.parametrize("scope", [7, None, {"affinity": True}])
def test_a_scope_of_another_form_grants_nothing(scope: object) -> None:
    assert by_bearer(authenticator(), token(scope=scope)).scopes == frozenset()


def test_a_credential_longer_than_any_of_ours_is_not_even_read() -> None:
    padding = "x" * MAX_CREDENTIAL_BYTES
    long_key = KEY + padding
    gate = Authenticator({digest(long_key): ALICE}, JwtRules(SECRET))

    for credential in (long_key, token(padding=padding)):
        assert refuses(gate, f"Bearer {credential}") == "This API key is not known."
        assert refuses(gate, None, credential) == "This API key is not known."


def without(claim: str) -> str:
    claims = {"sub": "bob", "exp": NOW_S + 60}
    del claims[claim]
    return jwt.encode(claims, SECRET, "HS256")


@pytest.mark.parametrize(
    "forged",
    [
        token(secret=b"t" * 64),
        token(algorithm="HS512"),
        jwt.encode({"sub": "bob", "exp": NOW_S + 60}, "", "none"),
        without("exp"),
        without("sub"),
        token(sub=""),
        token(sub=7),
        token(tenant=""),
        token(tenant=["acme"]),
        token(exp="never"),
        token(exp=True),
        token(exp=float("inf")),
        token(exp=float("nan")),
        token(nbf="now"),
        token(nbf=True),
        token() + "x",
        "a.b.c",
        "..",
        base64.urlsafe_b64encode(b"[" * 5_000).decode().rstrip("=") + ".e30.AA",
        base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": 7}).encode()).decode().rstrip("=") + ".e30.AA",
        "a" * (MAX_CREDENTIAL_BYTES + 1),
    ],
)
def test_a_token_that_is_not_whole_is_refused_and_told_nothing(forged: str) -> None:
    assert refuses(authenticator(), f"Bearer {forged}") == "This API key is not known."


@pytest.mark.parametrize(
    ("now_s", "valid"), [(NOW_S - 6, False), (NOW_S - 5, True), (NOW_S + 64.9, True), (NOW_S + 65, False)]
)
def test_a_token_lives_from_not_before_to_its_expiry_with_five_seconds_of_grace(now_s: float, *, valid: bool) -> None:
    credential = token(nbf=NOW_S)

    if valid:
        assert by_bearer(authenticator(), credential, now_s).subject == "bob"
    else:
        assert refuses(authenticator(), f"Bearer {credential}", now_s=now_s)


def test_the_time_that_is_given_counts_and_no_clock_does() -> None:
    far_s = 10_000_000_000.0

    assert by_bearer(authenticator(), token(iat=far_s, nbf=far_s, exp=far_s + 60), far_s).subject == "bob"


def test_a_token_that_was_believed_is_forgotten_when_it_expires() -> None:
    gate, credential = authenticator(), token()

    assert by_bearer(gate, credential) is by_bearer(gate, credential, NOW_S + 64)
    assert refuses(gate, f"Bearer {credential}", now_s=NOW_S + 65)
    assert not gate._seen


def test_what_is_remembered_is_bounded_and_refusals_are_not_remembered() -> None:
    gate = authenticator()
    gate._seen.update({str(number): (ALICE, NOW_S) for number in range(MAX_SEEN)})

    refuses(gate, "Bearer a.b.c")
    by_bearer(gate, token())
    assert len(gate._seen) == MAX_SEEN
    assert "0" not in gate._seen


def test_issuer_and_audience_are_checked_where_they_are_configured() -> None:
    gate = authenticator(issuer="us", audience="edge")

    assert by_bearer(gate, token(iss="us", aud=["edge", "other"])).subject == "bob"
    for forged in (token(iss="us"), token(aud="edge"), token(iss="them", aud="edge"), token(iss="us", aud="them")):
        assert refuses(gate, f"Bearer {forged}")


def test_only_algorithms_of_a_shared_secret_that_is_long_enough_can_be_configured() -> None:
    for algorithm in ("none", "RS256", "hs256"):
        with pytest.raises(ValueError, match="shared secret"):
            JwtRules(SECRET, (algorithm,))
    with pytest.raises(ValueError, match="HS512 needs at least 64"):
        JwtRules(b"s" * 63, ("HS256", "HS512"))
    with pytest.raises(ValueError, match="HS256 needs at least 32"):
        JwtRules(b"s" * 31)
    with pytest.raises(ValueError, match="HS384 needs at least 48"):
        JwtRules(b"s" * 47, ("HS384",))


def test_a_secret_of_just_the_needed_length_will_do() -> None:
    for algorithm, length in (("HS256", 32), ("HS384", 48), ("HS512", 64)):
        gate = Authenticator({}, JwtRules(b"s" * length, (algorithm,)))
        assert by_bearer(gate, token(secret=b"s" * length, algorithm=algorithm)).subject == "bob"
