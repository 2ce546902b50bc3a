"""An envelope says what the edge signed, to whom, for a minute, once; anything else is refused."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from enginelink.envelope import (
    LEEWAY_S,
    LIFE_S,
    MAX_TOKEN_BYTES,
    Claims,
    EnvelopeError,
    Key,
    ReplayGuard,
    Signer,
    Verifier,
    prompt_sha256,
    signing_key,
)

KEY = Key("k1", b"s" * 32)
NOW_S = 1_000_000
WORKER = "instance-1"
CLAIMS = Claims(
    purpose="submit",
    iss="edge-1",
    aud=WORKER,
    issued_s=NOW_S,
    expires_s=NOW_S + LIFE_S,
    jti="j1",
    request_id="r1",
    request_type="context_only",
    model="m",
    turn="t1",
    tenant="acme",
    family="f",
    conversation="c",
    parent="p",
    depth=1,
    final=True,
    prompt_sha256=prompt_sha256(b"\1\0\0\0"),
)


def make_verifier(*keys: Key, audience: str = WORKER, capacity: int = 100) -> Verifier:
    return Verifier(keys or (KEY,), audience, ReplayGuard(capacity))


def signed(key: Key = KEY, **changes: Any) -> str:
    return Signer(key).sign(msgspec.structs.replace(CLAIMS, **changes))


def refused(token: str, now_s: float = NOW_S, verifier: Verifier | None = None, **expected: object) -> str:
    with pytest.raises(EnvelopeError) as caught:
        (verifier or make_verifier()).verify(token, now_s, **expected)
    return str(caught.value)


def part(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def hand_made(header: object, secret: bytes = KEY.secret, claims: object = None) -> str:
    """A token with any header and claims at all, rightly signed."""
    body = f"{part(header)}.{signed().split('.')[1] if claims is None else part(claims)}"
    return f"{body}.{part(hmac.digest(secret, body.encode(), hashlib.sha256))}"


def test_what_was_signed_is_what_is_read() -> None:
    assert (
        make_verifier().verify(signed(), NOW_S, model="m", request_id="r1", prompt_sha256=CLAIMS.prompt_sha256)
        == CLAIMS
    )


def test_pyjwt_reads_what_we_sign() -> None:
    read = jwt.decode(
        signed(), KEY.secret, ["HS256"], audience=WORKER, options={"verify_exp": False, "verify_iat": False}
    )

    assert read["exp"] - read["iat"] == LIFE_S
    assert {name: read[name] for name in ("purpose", "iss", "aud", "jti", "parent", "depth", "final")} == {
        "purpose": "submit",
        "iss": "edge-1",
        "aud": WORKER,
        "jti": "j1",
        "parent": "p",
        "depth": 1,
        "final": True,
    }
    assert jwt.get_unverified_header(signed()) == {"alg": "HS256", "kid": "k1", "typ": "JWT"}


def test_we_read_what_pyjwt_signs() -> None:
    token = jwt.encode(msgspec.to_builtins(CLAIMS), KEY.secret, "HS256", {"kid": "k1"})

    assert make_verifier().verify(token, NOW_S) == CLAIMS


@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 9), st.booleans())
def test_any_claims_survive_the_way(conversation: str, model: str, depth: int, final: bool) -> None:
    claims = msgspec.structs.replace(CLAIMS, conversation=conversation, model=model, depth=depth, final=final)

    assert make_verifier().verify(Signer(KEY).sign(claims), NOW_S, model=model) == claims


def test_a_key_is_told_by_its_id_and_a_retired_or_unknown_one_is_refused() -> None:
    old, new = dataclasses.replace(KEY, retire_at_s=NOW_S + 10.0), Key("k2", b"t" * 32)

    assert make_verifier(old, new).verify(signed(new), NOW_S + 11)
    assert make_verifier(old, new).verify(signed(old), NOW_S + 9)
    assert refused(signed(old), NOW_S + 10, make_verifier(old, new)) == "unknown or retired key"
    assert refused(signed(old), NOW_S, make_verifier(new)) == "unknown or retired key"
    assert refused(signed(Key("k1", b"u" * 32))) == "not signed with the key it names"


def test_the_newest_key_that_may_sign_does() -> None:
    old, new = Key("a", b"s" * 32, 0.0, retire_at_s=1000.0), Key("b", b"t" * 32, 500.0)

    assert [signing_key([new, old], now_s) for now_s in (499.0, 500.0, 2000.0)] == [old, new, new]
    assert signing_key([old], 1000.0) is None
    assert signing_key([], 0.0) is None


def test_a_short_secret_is_no_key() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        Key("k", b"s" * 31)


@pytest.mark.parametrize(
    "header",
    [
        {"alg": "none", "kid": "k1", "typ": "JWT"},
        {"alg": "HS512", "kid": "k1", "typ": "JWT"},
        {"alg": "hs256", "kid": "k1", "typ": "JWT"},
        {"alg": "HS256", "typ": "JWT"},
        {"alg": "HS256", "kid": 1, "typ": "JWT"},
        {"alg": "HS256", "kid": "k2", "typ": "JWT"},
        {"alg": "HS256", "kid": "../../etc/passwd", "typ": "JWT"},
        {"alg": "HS256", "kid": "k1", "typ": "JWT", "crit": ["b64"], "b64": False},
        {"alg": "HS256", "kid": "k1", "typ": "JWT", "jku": "http://127.0.0.1/keys"},
        {"alg": "HS256", "kid": "k1"},
        {"alg": "HS256", "kid": "k1", "typ": "kinroute-lineage+jwt"},
        b"[" * 2_000,
        b"\xff",
    ],
)
def test_no_header_but_ours_is_read_even_rightly_signed(header: object) -> None:
    assert refused(hand_made(header))


@pytest.mark.parametrize(
    "claims",
    [
        [],
        {},
        {"purpose": "submit"},
        msgspec.to_builtins(CLAIMS) | {"exp": "never"},
        msgspec.to_builtins(CLAIMS) | {"exp": None},
        msgspec.to_builtins(CLAIMS) | {"aud": [WORKER]},
        msgspec.to_builtins(CLAIMS) | {"final": 1},
        b"[" * 2_000,
        b"\xff",
        b"",
    ],
)
def test_claims_of_another_form_are_refused_even_rightly_signed(claims: object) -> None:
    assert refused(hand_made({"alg": "HS256", "kid": "k1", "typ": "JWT"}, claims=claims)).startswith(
        "unreadable claims"
    )


def test_what_is_too_long_is_refused_even_rightly_signed() -> None:
    assert refused(signed(model="m" * MAX_TOKEN_BYTES)) == "too long or not ASCII"


def test_a_public_key_is_no_secret() -> None:
    """The classic confusion: a token signed with HMAC under the bytes of a public key that everyone has."""
    public = rsa.generate_private_key(65537, 2048).public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)

    assert refused(hand_made({"alg": "HS256", "kid": "k1", "typ": "JWT"}, pem)) == "not signed with the key it names"


@pytest.mark.parametrize("at", range(0, len(signed()), 7))
def test_a_token_that_was_altered_anywhere_is_refused(at: int) -> None:
    token = signed()
    other = "A" if token[at] != "A" else "B"

    assert refused(token[:at] + other + token[at + 1 :])


@pytest.mark.parametrize(
    "token", ["", ".", "..", "a.b", "a.b.c", "é.b.c", "\ud800.b.c", "a" * 5_000, signed() + "=", signed() + "."]
)
def test_what_is_no_token_is_refused(token: str) -> None:
    assert refused(token)


def test_a_signature_has_one_spelling() -> None:
    """The last character's spare bits, and + for -, would be second tokens for one statement."""
    start, _, signature = signed().rpartition(".")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    sibling = alphabet[alphabet.index(signature[-1]) ^ 1]

    assert refused(f"{start}.{signature[:-1]}{sibling}") == "not base64url"


@pytest.mark.parametrize(
    ("now_s", "valid"),
    [
        (NOW_S - LEEWAY_S - 1, False),
        (NOW_S - LEEWAY_S, True),
        (NOW_S + LIFE_S + LEEWAY_S - 0.1, True),
        (NOW_S + LIFE_S + LEEWAY_S, False),
    ],
)
def test_it_lives_a_minute_with_five_seconds_of_grace(now_s: float, *, valid: bool) -> None:
    if valid:
        assert make_verifier().verify(signed(), now_s)
    else:
        assert refused(signed(), now_s) == "outside its life"


def test_no_edge_can_sign_for_longer_than_a_minute() -> None:
    assert refused(signed(expires_s=NOW_S + LIFE_S + 1)) == "a life of more than 60 s"


def test_it_is_worth_nothing_to_another_worker_or_after_a_restart() -> None:
    assert "another worker" in refused(signed(), verifier=make_verifier(audience="instance-2"))


@pytest.mark.parametrize(
    "expected",
    [
        {"model": "other"},
        {"request_id": "r2"},
        {"request_type": "generation_only"},
        {"conversation": "c2"},
        {"prompt_sha256": prompt_sha256(b"\2\0\0\0")},
        {"purpose": "link"},
    ],
)
def test_it_stands_for_the_request_it_was_signed_for(expected: dict[str, str]) -> None:
    [name] = expected

    with pytest.raises(EnvelopeError, match=f"another {name} than the request's"):
        make_verifier().verify(signed(), NOW_S, **expected)


def test_it_is_believed_once_and_a_refusal_does_not_spend_it() -> None:
    verifier, token = make_verifier(), signed()

    refused(token, verifier=verifier, model="other")
    assert verifier.verify(token, NOW_S, model="m")
    assert refused(token, verifier=verifier, model="m") == "seen before"
    assert refused(signed(jti=""), verifier=verifier) == "no jti"


def test_it_is_not_believed_again_in_its_last_seconds_of_grace() -> None:
    verifier, token = make_verifier(), signed()

    assert verifier.verify(token, NOW_S)
    assert refused(token, NOW_S + LIFE_S + LEEWAY_S - 0.1, verifier) == "seen before"


def test_a_worker_that_can_remember_no_more_refuses_until_one_has_expired() -> None:
    verifier = make_verifier(capacity=1)
    assert verifier.verify(signed(), NOW_S)

    assert refused(signed(jti="j2"), NOW_S, verifier) == "too many envelopes are alive"
    later = NOW_S + LIFE_S + LEEWAY_S
    assert verifier.verify(signed(jti="j2", issued_s=later, expires_s=later + LIFE_S), later)


def test_the_guard_forgets_what_expired_and_nothing_sooner() -> None:
    guard = ReplayGuard(capacity=2)

    assert guard.first("a", until_s=10.0, now_s=0.0)
    assert guard.first("b", until_s=20.0, now_s=0.0)
    with pytest.raises(EnvelopeError, match="too many"):
        guard.first("c", until_s=20.0, now_s=9.9)
    assert not guard.first("a", until_s=10.0, now_s=9.9)
    assert guard.first("c", until_s=20.0, now_s=10.0)
    assert not guard.first("b", until_s=20.0, now_s=10.0)
