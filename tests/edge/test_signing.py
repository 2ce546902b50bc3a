"""What the edge signs of a leg is what a worker with the same keys believes."""

from __future__ import annotations

import pytest

from edge.core.life_events import Phase
from edge.core.types import ConversationKey, FamilyKey, Lineage, SamplingOptions, StopOptions, TurnId
from edge.legs import LegOrder
from edge.signing import EnvelopeSigner
from enginelink.envelope import Claims, EnvelopeError, Key, ReplayGuard, Verifier, prompt_sha256

OLD, NEW = Key("old", b"o" * 32, sign_from_s=0.0), Key("new", b"n" * 32, sign_from_s=500.0)
WORKER = "instance-1"
CHILD = Lineage(ConversationKey("c"), FamilyKey("f"), ConversationKey("p"), depth=1, final=True)
ROOT = Lineage(ConversationKey("c"), FamilyKey("c"))


def make_order(*, phase: Phase = Phase.CONTEXT, lineage: Lineage = CHILD) -> LegOrder:
    return LegOrder(
        request_id="r1",
        turn_id=TurnId("t1"),
        phase=phase,
        model="m",
        token_ids=b"\1\0\0\0",
        sampling=SamplingOptions(),
        stops=StopOptions(max_tokens=1),
        lineage=lineage,
        tenant="acme",
        cache_salt="s",
    )


def make_signer(*keys: Key, now_s: float = 100.9) -> EnvelopeSigner:
    return EnvelopeSigner("edge-1", keys, lambda: now_s)


def believed(token: str, *keys: Key, now_s: float = 100.9) -> Claims:
    return Verifier(keys, WORKER, ReplayGuard()).verify(token, now_s)


def test_a_leg_is_signed_with_all_that_its_worker_checks() -> None:
    claims = believed(make_signer(OLD).leg(make_order(), WORKER), OLD)

    assert claims == Claims(
        purpose="submit",
        iss="edge-1",
        aud=WORKER,
        issued_s=100,
        expires_s=160,
        jti=claims.jti,
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


def test_a_leg_without_a_parent_names_none() -> None:
    claims = believed(make_signer(OLD).leg(make_order(lineage=ROOT), WORKER), OLD)

    assert (claims.parent, claims.depth, claims.final) == ("", 0, False)


@pytest.mark.parametrize(
    ("phase", "request_type"),
    [
        (Phase.CONTEXT, "context_only"),
        (Phase.GENERATION, "generation_only"),
        (Phase.AGGREGATED, "context_and_generation"),
    ],
)
def test_an_envelope_for_one_phase_is_not_one_for_another(phase: Phase, request_type: str) -> None:
    assert believed(make_signer(OLD).leg(make_order(phase=phase), WORKER), OLD).request_type == request_type


def test_a_link_is_opened_for_one_start_of_one_worker() -> None:
    token = make_signer(OLD).link(WORKER)

    assert believed(token, OLD) == Claims("link", "edge-1", WORKER, 100, 160, believed(token, OLD).jti)
    with pytest.raises(EnvelopeError, match="another worker"):
        believed(make_signer(OLD).link("instance-2"), OLD)


def test_no_two_envelopes_are_one_even_for_the_same_leg() -> None:
    signer, worker = make_signer(OLD), Verifier((OLD,), WORKER, ReplayGuard())
    tokens = [signer.leg(make_order(), WORKER), signer.leg(make_order(), WORKER), signer.link(WORKER)]

    assert len({worker.verify(token, 100.0).jti for token in tokens}) == 3


def test_a_new_key_signs_from_its_time_on_and_not_sooner() -> None:
    for now_s, key in ((499.0, OLD), (500.0, NEW)):
        token = make_signer(OLD, NEW, now_s=now_s).leg(make_order(), WORKER)
        assert believed(token, key, now_s=now_s)


def test_without_a_key_that_may_sign_nothing_is_signed() -> None:
    assert make_signer().leg(make_order(), WORKER) == ""
    assert make_signer(NEW, now_s=499.0).link(WORKER) == ""


def test_a_return_is_signed_for_one_worker_with_the_turn_and_no_prompt() -> None:
    claims = believed(make_signer(OLD).returned(ROOT, TurnId("t1"), "acme", WORKER), OLD)

    assert (claims.purpose, claims.aud, claims.turn) == ("return", WORKER, "t1")
    assert (claims.conversation, claims.family, claims.tenant) == ("c", "c", "acme")
    assert (claims.prompt_sha256, claims.request_id) == ("", "")
