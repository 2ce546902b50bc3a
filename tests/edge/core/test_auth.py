"""Who is let in, and for how long."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import jwt
import pytest

from edge.core.auth import MAX_CREDENTIAL_BYTES, MAX_SEEN, REFUSED, Authenticator, UnknownKeyId
from edge.core.errors import Code, EdgeError
from edge.core.jwt_keys import KeySet, secret_keys
from edge.core.jwt_rules import JwtRules
from edge.core.types import Principal

SECRET = b"s" * 64
KEY = "kr-right"
ALICE = Principal("acme", "alice", frozenset({"affinity"}), "k1")
NOW_S = 1_000_000.0


def digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()


def authenticator(**rules: Any) -> Authenticator:
    return Authenticator({digest(KEY): ALICE}, JwtRules(("HS256",), **rules), secret_keys(SECRET, ("HS256",)))


def token(*, secret: bytes = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    return jwt.encode({"sub": "bob", "exp": NOW_S + 60, **claims}, secret, algorithm)


def by_bearer(gate: Authenticator, credential: str, now_s: float = NOW_S) -> Principal:
    return gate.authenticate(f"Bearer {credential}", None, now_s)


def refuses(gate: Authenticator, authorization: str | None, x_api_key: str | None = None, now_s: float = NOW_S) -> str:
    """The reason, which the caller does not see."""
    with pytest.raises(EdgeError) as caught:
        gate.authenticate(authorization, x_api_key, now_s)
    assert (caught.value.code, caught.value.message) == (Code.UNAUTHENTICATED, REFUSED), "it says nothing of why"
    return caught.value.reason


def test_a_key_is_known_by_its_hash_in_either_header() -> None:
    gate = authenticator()

    assert gate.authenticate(f"Bearer {KEY}", None, NOW_S) is ALICE
    assert gate.authenticate(f"bearer  {KEY} ", None, NOW_S) is ALICE
    assert gate.authenticate(None, KEY, NOW_S) is ALICE
    assert gate.authenticate(f"Bearer {KEY}", KEY, NOW_S) is ALICE


@pytest.mark.parametrize("credential", ["kr-wrong", digest(KEY), KEY + " x", KEY.upper(), f"{KEY}\nBearer {KEY}", "é"])
def test_any_other_key_is_refused_and_told_nothing(credential: str) -> None:
    assert refuses(authenticator(), f"Bearer {credential}") == "unknown key"


def test_a_key_whose_hash_only_starts_alike_is_another_key() -> None:
    near = digest(KEY)[:8] + "0" * 56
    gate = Authenticator({near: Principal("other", "other", frozenset()), digest(KEY): ALICE})

    assert by_bearer(gate, KEY) is ALICE
    assert refuses(Authenticator({near: ALICE}), f"Bearer {KEY}")


@pytest.mark.parametrize("authorization", ["Basic abc", "Bearer", "Bearer ", KEY])
def test_only_bearer_credentials_are_taken(authorization: str) -> None:
    assert refuses(authenticator(), authorization) == "malformed"


def test_two_different_credentials_are_none() -> None:
    assert refuses(authenticator(), f"Bearer {KEY}", "kr-other") == "malformed"


def test_nobody_is_anonymous_unless_it_is_said_who_that_is() -> None:
    nobody = Principal("default", "anonymous", frozenset())

    assert refuses(authenticator(), None, "") == "no credential"
    assert Authenticator({}, anonymous=nobody).authenticate(None, None, NOW_S) is nobody
    assert refuses(Authenticator({}, anonymous=nobody), "Bearer kr-wrong")


def test_a_token_says_who_calls() -> None:
    believed = by_bearer(authenticator(), token(tenant="acme", scope="affinity openid operator"))

    assert believed == Principal("acme", "bob", frozenset({"affinity", "operator"}), "jwt")
    assert by_bearer(authenticator(), token()) == Principal("default", "bob", frozenset(), "jwt")


def test_a_credential_longer_than_any_of_ours_is_not_even_read() -> None:
    padding = "x" * MAX_CREDENTIAL_BYTES
    long_key = KEY + padding
    gate = Authenticator({digest(long_key): ALICE}, JwtRules(("HS256",)), secret_keys(SECRET, ("HS256",)))

    for credential in (long_key, token(padding=padding)):
        assert refuses(gate, f"Bearer {credential}") == "malformed"
        assert refuses(gate, None, credential) == "malformed"


def test_an_api_key_with_an_end_works_until_then() -> None:
    gate = Authenticator({digest(KEY): ALICE}, ends_s={digest(KEY): NOW_S})

    assert by_bearer(gate, KEY, NOW_S - 0.1) is ALICE
    assert refuses(gate, f"Bearer {KEY}") == "expired"


def test_other_api_keys_replace_those_there_were() -> None:
    gate = authenticator()
    gate.use({digest("kr-new"): ALICE})

    assert by_bearer(gate, "kr-new") is ALICE
    assert refuses(gate, f"Bearer {KEY}") == "unknown key"
    assert by_bearer(gate, token()).subject == "bob", "tokens go on"


def test_tokens_are_forgotten_when_the_keys_change_and_not_when_they_are_the_same() -> None:
    gate, credential = authenticator(), token()
    believed = by_bearer(gate, credential)

    gate.use_token_keys(secret_keys(SECRET, ("HS256",)))
    assert by_bearer(gate, credential) is believed
    gate.use_token_keys(secret_keys(b"t" * 64, ("HS256",)))
    assert refuses(gate, f"Bearer {credential}") == "bad signature"
    gate.use_token_keys(KeySet())
    with pytest.raises(UnknownKeyId):
        by_bearer(gate, credential)


@pytest.mark.parametrize("padding", ["=", "=="])
def test_a_token_has_one_spelling(padding: str) -> None:
    assert refuses(authenticator(), f"Bearer {token()}{padding}") == "malformed"


def without(claim: str) -> str:
    claims = {"sub": "bob", "exp": NOW_S + 60}
    del claims[claim]
    return jwt.encode(claims, SECRET, "HS256")


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (token(secret=b"t" * 64), "bad signature"),
        (token(algorithm="HS512"), "algorithm"),
        (jwt.encode({"sub": "bob", "exp": NOW_S + 60}, "", "none"), "algorithm"),
        (without("exp"), "claims"),
        (without("sub"), "claims"),
        (token(sub=""), "claims"),
        (token(sub=7), "claims"),
        (token(sub="a\nb"), "claims"),
        (token(tenant=""), "claims"),
        (token(tenant=["acme"]), "claims"),
        (token(exp="never"), "claims"),
        (token(exp=True), "claims"),
        (token(exp=float("inf")), "claims"),
        (token(exp=float("nan")), "claims"),
        (token(nbf="now"), "claims"),
        (token(nbf=True), "claims"),
        (token(exp=NOW_S - 60), "expired"),
        (token(nbf=NOW_S + 60), "not yet valid"),
        (token() + "x", "bad signature"),
        ("a.b.c", "malformed"),
        ("..", "malformed"),
        (base64.urlsafe_b64encode(b"[" * 5_000).decode().rstrip("=") + ".e30.AA", "malformed"),
        (
            base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": 7}).encode()).decode().rstrip("=") + ".e30.AA",
            "malformed",
        ),
    ],
)
def test_a_token_that_is_not_whole_is_refused_and_told_nothing(forged: str, reason: str) -> None:
    assert refuses(authenticator(), f"Bearer {forged}") == reason


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
    for forged in (token(aud="edge"), token(iss="them", aud="edge")):
        assert refuses(gate, f"Bearer {forged}") == "issuer"
    for forged in (token(iss="us"), token(iss="us", aud="them")):
        assert refuses(gate, f"Bearer {forged}") == "audience"
