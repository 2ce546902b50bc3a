"""A lineage token says who a conversation is, within its tenant, for a day; anything else is refused."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.lineage_token import LEEWAY_S, MAX_LIFE_S, MAX_TOKEN_BYTES, TYP, LineageTokenError, LineageTokens, Stated
from edge.core.types import ConversationKey, FamilyKey, Lineage
from enginelink.envelope import Claims, EnvelopeError, Key, ReplayGuard, Signer, Verifier

KEY = Key("k1", b"s" * 32)
NOW_S = 1_000_000.9
CHILD = Lineage(ConversationKey("c"), FamilyKey("f"), ConversationKey("p"), depth=1)
STATED = Stated(FamilyKey("f"), ConversationKey("c"), 1)
CLAIMS: dict[str, Any] = {
    "tenant": "acme",
    "family": "f",
    "conversation": "c",
    "depth": 1,
    "iat": int(NOW_S),
    "exp": int(NOW_S) + MAX_LIFE_S,
}


def issued(*keys: Key, tenant: str = "acme", lineage: Lineage = CHILD, now_s: float = NOW_S) -> str:
    return LineageTokens(keys or (KEY,)).issue(tenant, lineage, now_s)


def believed(token: str, *keys: Key, tenant: str = "acme", now_s: float = NOW_S) -> Stated:
    return LineageTokens(keys or (KEY,)).verify(token, tenant, now_s)


def refused(token: str, *keys: Key, tenant: str = "acme", now_s: float = NOW_S) -> str:
    with pytest.raises(LineageTokenError) as caught:
        believed(token, *keys, tenant=tenant, now_s=now_s)
    return caught.value.reason


def by_pyjwt(claims: dict[str, Any] = CLAIMS, header: dict[str, Any] | None = None, secret: bytes = KEY.secret) -> str:
    return jwt.encode(claims, secret, "HS256", header or {"kid": "k1", "typ": TYP})


def part(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def hand_made(header: object, claims: object = CLAIMS) -> str:
    """Any header and claims at all, rightly signed."""
    body = f"{part(header)}.{part(claims)}"
    return f"{body}.{part(hmac.digest(KEY.secret, body.encode(), hashlib.sha256))}"


def test_every_replica_with_the_key_believes_what_one_of_them_issued() -> None:
    assert believed(issued()) == STATED


def test_pyjwt_reads_what_we_issue() -> None:
    token = issued()

    assert jwt.decode(token, KEY.secret, ["HS256"], options={"verify_exp": False, "verify_iat": False}) == CLAIMS
    assert jwt.get_unverified_header(token) == {"alg": "HS256", "kid": "k1", "typ": TYP}


def test_we_read_what_pyjwt_signs() -> None:
    assert believed(by_pyjwt()) == STATED


@given(st.text(max_size=60), st.text(max_size=32), st.integers(0, 1000))
def test_whoever_the_conversation_is_survives_the_way(tenant: str, conversation: str, depth: int) -> None:
    lineage = Lineage(ConversationKey(conversation), FamilyKey("f"), depth=depth)

    token = issued(tenant=tenant, lineage=lineage)

    assert believed(token, tenant=tenant) == Stated(FamilyKey("f"), ConversationKey(conversation), depth)


def test_it_is_believed_in_its_tenant_only() -> None:
    assert refused(issued(), tenant="evil") == "another tenant"


@pytest.mark.parametrize(
    ("now_s", "reason"),
    [
        (NOW_S - LEEWAY_S - 1.0, "not yet valid"),
        (NOW_S - LEEWAY_S, ""),
        (NOW_S + MAX_LIFE_S + LEEWAY_S - 1.0, ""),
        (NOW_S + MAX_LIFE_S + LEEWAY_S, "expired"),
    ],
)
def test_it_lives_a_day_with_five_seconds_of_grace(now_s: float, reason: str) -> None:
    if reason:
        assert refused(issued(), now_s=now_s) == reason
    else:
        assert believed(issued(), now_s=now_s) == STATED


def test_its_life_may_be_set_shorter_and_nobody_can_sign_a_longer_one() -> None:
    token = LineageTokens((KEY,), life_s=60).issue("acme", CHILD, NOW_S)

    assert refused(token, now_s=NOW_S + 66.0) == "expired"
    assert refused(by_pyjwt(CLAIMS | {"exp": CLAIMS["exp"] + 1})) == "a life too long"


def test_an_envelope_is_no_lineage_token_and_a_lineage_token_no_envelope() -> None:
    """Not even under one key, and whatever the claims are."""
    start = int(NOW_S)
    claims = Claims("submit", "e", "w", start, start + 60, "j", tenant="acme", family="f", conversation="c", depth=1)
    envelopes = Verifier((KEY,), "w", ReplayGuard())

    assert envelopes.verify(Signer(KEY).sign(claims), NOW_S) == claims
    assert refused(Signer(KEY).sign(claims)) == "another type"
    for token in (issued(), by_pyjwt({**CLAIMS, "purpose": "submit", "iss": "e", "aud": "w", "jti": "j2"})):
        with pytest.raises(EnvelopeError, match="another type"):
            envelopes.verify(token, NOW_S)


def test_a_new_key_signs_from_its_time_on_and_an_old_one_is_believed_until_it_retires() -> None:
    old, new = dataclasses.replace(KEY, retire_at_s=NOW_S + 600.0), Key("k2", b"t" * 32, sign_from_s=NOW_S + 300.0)
    tokens = LineageTokens((KEY,))
    first = tokens.issue("acme", CHILD, NOW_S)

    tokens.use((old, new))

    assert jwt.get_unverified_header(tokens.issue("acme", CHILD, NOW_S + 299.0))["kid"] == "k1"
    assert jwt.get_unverified_header(tokens.issue("acme", CHILD, NOW_S + 300.0))["kid"] == "k2"
    assert tokens.verify(first, "acme", NOW_S + 599.0) == STATED
    with pytest.raises(LineageTokenError, match="unknown or retired key"):
        tokens.verify(first, "acme", NOW_S + 600.0)


def test_a_key_that_is_gone_is_not_believed_from_then_on() -> None:
    tokens = LineageTokens((KEY,))
    token = tokens.issue("acme", CHILD, NOW_S)
    assert tokens.verify(token, "acme", NOW_S) == STATED

    tokens.use(())

    assert tokens.issue("acme", CHILD, NOW_S) == ""
    with pytest.raises(LineageTokenError, match="unknown or retired key"):
        tokens.verify(token, "acme", NOW_S)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"alg": "none", "kid": "k1", "typ": TYP}, "another algorithm"),
        ({"alg": "HS512", "kid": "k1", "typ": TYP}, "another algorithm"),
        ({"alg": "HS256", "kid": "k1", "typ": "JWT"}, "another type"),
        ({"alg": "HS256", "kid": "k1"}, "unreadable header"),
        ({"alg": "HS256", "kid": "k9", "typ": TYP}, "unknown or retired key"),
        ({"alg": "HS256", "kid": "../../etc/passwd", "typ": TYP}, "unknown or retired key"),
        ({"alg": "HS256", "kid": "k1", "typ": TYP, "jku": "http://127.0.0.1/"}, "unreadable header"),
        (b"[" * 500, "unreadable header"),
    ],
)
def test_no_header_but_ours_is_read_even_rightly_signed(header: object, reason: str) -> None:
    assert refused(hand_made(header)) == reason


@pytest.mark.parametrize(
    "claims",
    [
        [],
        {name: value for name, value in CLAIMS.items() if name != "exp"},
        CLAIMS | {"exp": "never"},
        CLAIMS | {"depth": -1},
        CLAIMS | {"depth": True},
        CLAIMS | {"tenant": ["acme"]},
        b"[" * 500,
        b"\xff",
    ],
)
def test_claims_of_another_form_are_refused_even_rightly_signed(claims: object) -> None:
    assert refused(hand_made({"alg": "HS256", "kid": "k1", "typ": TYP}, claims)) == "unreadable claims"


@pytest.mark.parametrize("at", range(0, len(issued()), 5))
def test_a_token_that_was_altered_anywhere_is_refused(at: int) -> None:
    token = issued()

    assert refused(token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :])


@pytest.mark.parametrize("token", ["", ".", "..", "a.b.c", "é.b.c", "\ud800", "a" * 3_000, issued() + "="])
def test_what_is_no_token_is_refused(token: str) -> None:
    assert refused(token)


def test_no_token_is_longer_than_what_is_taken() -> None:
    room = next(n for n in range(MAX_TOKEN_BYTES, 0, -1) if issued(tenant="t" * n))

    assert believed(issued(tenant="t" * room), tenant="t" * room) == STATED
    assert issued(tenant="t" * (room + 1)) == ""
