"""How much may be in flight, and when to come again."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge.core import admission as module
from edge.core.admission import Admission, AdmissionLimits, Quota, Standing
from edge.core.errors import Code, EdgeError
from edge.core.types import Principal, TenantLimits


def make_admission(*, requests: int = 8192, replicas: int = 1, **tenant: int | None) -> Admission:
    return Admission(AdmissionLimits(requests, TenantLimits(**tenant), replicas))


def caller(tenant: str, **own: int) -> Principal:
    return Principal(tenant, "someone", frozenset(), limits=TenantLimits(**own))


A, B = caller("a"), caller("b")


def refused(admission: Admission, principal: Principal, now_s: float = 0.0, *, prompt: int | None = None) -> Any:
    """Why, and when to come again: of a prompt where one is given, else of a request."""
    act = partial(admission.begin, principal) if prompt is None else partial(admission.prompt, principal, prompt)
    with pytest.raises(EdgeError) as caught:
        act(now_s)
    return caught.value.reason, caught.value.retry_after_s


def test_a_tenant_at_its_limit_is_refused_and_no_other_is() -> None:
    admission = Admission(AdmissionLimits(tenant=TenantLimits(requests=2)))
    admission.begin(A, 0.0)
    admission.begin(A, 0.0)

    assert refused(admission, A) == ("tenant_requests", 1.0)
    admission.begin(B, 0.0)
    admission.end(A)
    admission.begin(A, 0.0)
    assert admission.in_flight == 3


def test_a_server_at_its_limit_is_overloaded_for_everybody() -> None:
    admission = make_admission(requests=1)
    admission.begin(A, 0.0)

    with pytest.raises(EdgeError) as caught:
        admission.begin(B, 0.0)
    assert (caught.value.code, caught.value.retry_after_s) == (Code.OVERLOADED, 1.0)
    admission.end(A)
    admission.begin(B, 0.0)


def test_requests_by_the_minute_come_back_one_after_the_other() -> None:
    admission = make_admission(requests_per_minute=2)
    for _ in range(2):
        admission.begin(A, 0.0)
        admission.end(A)

    assert refused(admission, A, 10.0) == ("tenant_requests_per_minute", 20.0)
    assert refused(admission, A, 29.9) == ("tenant_requests_per_minute", 1.0)
    admission.begin(A, 30.0)
    assert refused(admission, A, 30.0) == ("tenant_requests_per_minute", 30.0)


def test_a_prompt_is_charged_before_it_is_served_and_refused_where_its_tokens_are_not_left() -> None:
    admission = make_admission(tokens_per_minute=100)
    admission.begin(A, 0.0)
    admission.prompt(A, 70, 0.0)
    admission.begin(A, 0.0)

    assert refused(admission, A, prompt=40) == ("tenant_tokens_per_minute", 6.0)
    admission.prompt(A, 30, 0.0)
    admission.begin(B, 0.0)
    admission.prompt(B, 100, 0.0)


def test_a_prompt_that_never_fits_is_the_callers_mistake() -> None:
    admission = make_admission(tokens_per_minute=100)
    admission.begin(A, 0.0)

    with pytest.raises(EdgeError, match="101 tokens, and this tenant's limit is 100") as caught:
        admission.prompt(A, 101, 0.0)
    assert (caught.value.code, caught.value.retryable) == (Code.INVALID, False)


def test_generated_tokens_are_charged_as_they_come_even_over_the_limit() -> None:
    admission = make_admission(tokens_per_minute=100)
    admission.begin(A, 0.0)
    admission.prompt(A, 50, 0.0)
    admission.charge(A, 250, 0.0)

    # 300 used; once 250 are, the last prompt fits again.
    assert refused(admission, A, 0.0) == ("tenant_tokens_per_minute", 150.0)
    assert refused(admission, A, 119.0) == ("tenant_tokens_per_minute", 31.0)
    admission.begin(A, 150.0)
    admission.prompt(A, 50, 150.0)


def test_who_is_refused_for_its_prompt_is_told_to_wait_for_its_requests_too() -> None:
    admission = make_admission(requests_per_minute=1, tokens_per_minute=600)
    admission.begin(A, 0.0)
    admission.charge(A, 599, 0.0)

    assert refused(admission, A, prompt=2) == ("tenant_tokens_per_minute", 60.0)


def test_what_an_idle_tenant_spent_is_not_forgotten_within_the_minute() -> None:
    admission = make_admission(tokens_per_minute=60)
    admission.begin(A, 0.0)
    admission.prompt(A, 60, 0.0)
    admission.end(A)

    assert refused(admission, A, 0.5) == ("tenant_tokens_per_minute", 60.0)


def test_a_limit_of_nothing_refuses_everything() -> None:
    assert refused(make_admission(requests_per_minute=0), A) == ("tenant_requests_per_minute", 60.0)
    assert refused(make_admission(tokens_per_minute=0), A) == ("tenant_tokens_per_minute", 60.0)


def test_a_refused_request_counts_for_nothing() -> None:
    admission = Admission(AdmissionLimits(tenant=TenantLimits(requests=1, requests_per_minute=5)))
    admission.begin(A, 0.0)
    for _ in range(10):
        refused(admission, A)

    admission.end(A)
    admission.begin(A, 0.0)
    assert admission.in_flight == 1
    assert admission.refused == {"tenant_requests": 10}


def test_limits_of_a_principal_come_before_the_configured_ones() -> None:
    admission = make_admission(requests_per_minute=1)
    rich = caller("a", requests_per_minute=3)

    for _ in range(3):
        admission.begin(rich, 0.0)
    assert refused(admission, rich) == ("tenant_requests_per_minute", 20.0)
    assert refused(admission, A) == ("tenant_requests_per_minute", 60.0), "it is one tenant"


def test_each_of_several_replicas_gives_its_part() -> None:
    replicas = [make_admission(replicas=2, requests_per_minute=4) for _ in range(2)]

    for admission in replicas:
        for _ in range(2):
            admission.begin(A, 0.0)
        assert refused(admission, A)[0] == "tenant_requests_per_minute"


def test_more_replicas_each_give_less_from_then_on() -> None:
    admission = make_admission(requests_per_minute=60)
    assert admission.standing(A, 0.0).requests == Quota(60, 60, 0.0)

    admission.share_with(3)

    assert admission.standing(A, 0.0).requests == Quota(20, 20, 0.0)


def test_a_tenant_stands_where_it_used_its_limits_to() -> None:
    admission = make_admission(requests_per_minute=6, tokens_per_minute=600)
    full = Standing(Quota(6, 6, 0.0), Quota(600, 600, 0.0))
    assert admission.standing(A, 0.0) == full

    admission.begin(A, 0.0)
    admission.prompt(A, 100, 0.0)
    admission.charge(A, 20, 0.0)

    assert admission.standing(A, 0.0) == Standing(Quota(6, 5, 10.0), Quota(600, 480, 12.0))
    assert admission.standing(A, 30.0) == full
    assert make_admission().standing(A, 0.0) == Standing(None, None)


def test_ending_what_never_began_is_a_broken_promise_of_ours() -> None:
    admission = make_admission(requests_per_minute=5)
    admission.begin(A, 0.0)
    admission.end(A)

    with pytest.raises(AssertionError, match="never began"):
        admission.end(A)


def test_a_tenant_without_limits_by_the_minute_leaves_nothing_behind() -> None:
    admission = make_admission()
    admission.begin(A, 0.0)
    admission.prompt(A, 10, 0.0)
    admission.charge(A, 10, 0.0)
    admission.end(A)

    assert admission.num_tenants == 0


def test_tenants_that_used_nothing_of_this_minute_are_forgotten_as_others_come() -> None:
    admission = make_admission(requests_per_minute=60)
    for number in range(1000):
        admission.begin(caller(f"t{number}"), number)
        admission.end(caller(f"t{number}"))

    assert admission.num_tenants <= 3


def test_a_flood_of_tenants_is_bounded_and_takes_nothing_from_those_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 10)
    admission = make_admission(requests_per_minute=1)
    admission.begin(A, 0.0)
    for number in range(100):
        admission.begin(caller(f"t{number}"), 0.0)
        admission.end(caller(f"t{number}"))
        assert admission.num_tenants <= 10

    assert refused(admission, A)[0] == "tenant_requests_per_minute"
    admission.end(A)


class Tenants(RuleBasedStateMachine):
    """Against exact fractions of a minute that each tenant has used."""

    limits = AdmissionLimits(4, TenantLimits(requests=2, requests_per_minute=3, tokens_per_minute=50))

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(self.limits)
        self.now_s = 1000
        self.running: list[Principal] = []
        self.used = {(name, what): Fraction(0) for name in "abc" for what in ("requests", "tokens")}
        self.prompts = dict.fromkeys("abc", 1)

    tenants = st.sampled_from([caller(name) for name in "abc"])

    def fits(self, tenant: str, *, requests: int, tokens: int, after_s: float = 0.0) -> bool:
        passed = Fraction(after_s) / 60
        used = [max(Fraction(0), self.used[tenant, what] - passed) for what in ("requests", "tokens")]
        return used[0] + Fraction(requests, 3) <= 1 and used[1] + Fraction(tokens, 50) <= 1

    @rule(seconds=st.sampled_from([1, 7, 20, 60]))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        for key, used in self.used.items():
            self.used[key] = max(Fraction(0), used - Fraction(seconds, 60))

    @rule(principal=tenants)
    def a_request_comes(self, principal: Principal) -> None:
        tenant = principal.tenant
        if len(self.running) >= 4 or self.running.count(principal) >= 2:
            assert refused(self.admission, principal, self.now_s)[1] == 1.0
        elif self.fits(tenant, requests=1, tokens=1):
            self.admission.begin(principal, self.now_s)
            self.running.append(principal)
            self.used[tenant, "requests"] += Fraction(1, 3)
        else:
            _, retry_after_s = refused(self.admission, principal, self.now_s)
            assert retry_after_s >= 1.0
            tokens = self.prompts[tenant] if not self.fits(tenant, requests=0, tokens=1) else 1
            assert self.fits(tenant, requests=1, tokens=tokens, after_s=retry_after_s)

    @rule(at=st.integers(0, 3), tokens=st.integers(1, 50))
    def its_prompt_is_known(self, at: int, tokens: int) -> None:
        if at >= len(self.running):
            return
        principal = self.running[at]
        self.prompts[principal.tenant] = tokens
        if self.fits(principal.tenant, requests=0, tokens=tokens):
            self.admission.prompt(principal, tokens, self.now_s)
            self.used[principal.tenant, "tokens"] += Fraction(tokens, 50)
        else:
            reason, retry_after_s = refused(self.admission, principal, self.now_s, prompt=tokens)
            assert reason == "tenant_tokens_per_minute"
            assert self.fits(principal.tenant, requests=1, tokens=tokens, after_s=retry_after_s)

    @rule(at=st.integers(0, 3), tokens=st.integers(0, 30), ends=st.booleans())
    def an_answer_goes_on_and_may_end(self, at: int, tokens: int, ends: bool) -> None:
        if at < len(self.running):
            principal = self.running[at]
            self.admission.charge(principal, tokens, self.now_s)
            self.used[principal.tenant, "tokens"] += Fraction(tokens, 50)
            if ends:
                self.running.pop(at)
                self.admission.end(principal)

    @invariant()
    def what_is_in_flight_and_left_is_known(self) -> None:
        assert self.admission.in_flight == len(self.running)
        for name in "abc":
            standing = self.admission.standing(caller(name), self.now_s)
            for quota, what in ((standing.requests, "requests"), (standing.tokens, "tokens")):
                assert quota is not None
                left = max(Fraction(0), 1 - self.used[name, what]) * quota.limit
                assert quota.remaining == int(left + Fraction(1, 10**6))
                assert quota.reset_s == pytest.approx(float(60 * self.used[name, what]), abs=1e-6)


Tenants.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTenants = Tenants.TestCase
