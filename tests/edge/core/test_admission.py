"""How much may be in flight, and when to come again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge.core.admission import Admission, AdmissionLimits
from edge.core.errors import Code, EdgeError


def make_admission(**limits: Any) -> Admission:
    return Admission(AdmissionLimits(**limits))


def refused(admission: Admission, tenant: str, now_s: float = 0.0) -> tuple[Code, float | None]:
    with pytest.raises(EdgeError) as caught:
        admission.begin(tenant, now_s)
    assert caught.value.retryable
    return caught.value.code, caught.value.retry_after_s


def test_a_tenant_at_its_limit_is_refused_and_no_other_is() -> None:
    admission = make_admission(tenant_requests=2)
    admission.begin("a", 0.0)
    admission.begin("a", 0.0)

    assert refused(admission, "a") == (Code.RATE_LIMITED, 1.0)
    admission.begin("b", 0.0)
    admission.end("a")
    admission.begin("a", 0.0)
    assert admission.in_flight == 3


def test_a_server_at_its_limit_is_overloaded_for_everybody() -> None:
    admission = make_admission(requests=1)
    admission.begin("a", 0.0)

    assert refused(admission, "b") == (Code.OVERLOADED, 1.0)
    admission.end("a")
    admission.begin("b", 0.0)


def test_requests_of_the_last_minute_count_and_the_answer_says_when_one_leaves_it() -> None:
    admission = make_admission(tenant_requests_per_minute=2)
    for now_s in (0.0, 10.0):
        admission.begin("a", now_s)
        admission.end("a")

    assert refused(admission, "a", 20.0) == (Code.RATE_LIMITED, 40.0)
    assert refused(admission, "a", 59.9) == (Code.RATE_LIMITED, 1.0)
    admission.begin("a", 60.0)
    assert refused(admission, "a", 60.0) == (Code.RATE_LIMITED, 10.0)


def test_tokens_are_charged_when_they_are_known() -> None:
    admission = make_admission(tenant_tokens_per_minute=100)
    admission.begin("a", 0.0)
    admission.begin("a", 0.0)
    admission.charge("a", 99, 5.0)
    admission.begin("a", 5.0)
    admission.charge("a", 1, 6.0)

    assert refused(admission, "a", 15.0) == (Code.RATE_LIMITED, 50.0)
    admission.begin("a", 65.0)


def test_who_is_above_its_tokens_is_told_when_enough_of_them_have_left() -> None:
    admission = make_admission(tenant_tokens_per_minute=100)
    admission.begin("a", 0.0)
    admission.charge("a", 1, 0.0)
    admission.charge("a", 100, 30.0)

    assert refused(admission, "a", 40.0) == (Code.RATE_LIMITED, 50.0)
    admission.begin("a", 90.0)


def test_what_an_idle_tenant_spent_is_not_forgotten_within_the_minute() -> None:
    admission = make_admission(tenant_tokens_per_minute=100)
    admission.begin("a", 0.0)
    admission.charge("a", 100, 0.0)
    admission.end("a")

    assert refused(admission, "a", 59.0) == (Code.RATE_LIMITED, 1.0)


def test_a_request_that_ends_leaves_those_that_run_beside_it_counted() -> None:
    admission = make_admission(tenant_requests=2)
    admission.begin("a", 0.0)
    admission.begin("a", 0.0)
    admission.end("a")

    admission.begin("a", 0.0)
    assert refused(admission, "a") == (Code.RATE_LIMITED, 1.0)


def test_a_limit_of_nothing_refuses_everything() -> None:
    assert refused(make_admission(tenant_requests_per_minute=0), "a") == (Code.RATE_LIMITED, 60.0)
    assert refused(make_admission(tenant_tokens_per_minute=0), "a") == (Code.RATE_LIMITED, 60.0)


def test_a_refusal_counts_for_nothing() -> None:
    admission = make_admission(tenant_requests=1, tenant_requests_per_minute=5)
    admission.begin("a", 0.0)
    for _ in range(10):
        refused(admission, "a")

    admission.end("a")
    admission.begin("a", 0.0)
    assert admission.in_flight == 1


def test_ending_what_never_began_is_a_broken_promise_of_ours() -> None:
    admission = make_admission(tenant_requests_per_minute=5)
    admission.begin("a", 0.0)
    admission.end("a")

    with pytest.raises(AssertionError, match="never began"):
        admission.end("a")


def test_a_tenant_without_limits_by_the_minute_leaves_nothing_behind() -> None:
    admission = make_admission()
    admission.begin("a", 0.0)
    admission.charge("a", 10, 0.0)
    admission.end("a")

    assert not admission._tenants


class Tenants(RuleBasedStateMachine):
    """Against lists of what began and was spent when."""

    limits = AdmissionLimits(requests=4, tenant_requests=2, tenant_requests_per_minute=3, tenant_tokens_per_minute=50)

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(self.limits)
        self.now_s = 0.0
        self.running: list[str] = []
        self.began: list[tuple[float, str]] = []
        self.spent: list[tuple[float, str, int]] = []

    tenants = st.sampled_from("abc")

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(tenant=tenants)
    def a_request_comes(self, tenant: str) -> None:
        since_s = self.now_s - 60.0
        fits = (
            len(self.running) < 4
            and self.running.count(tenant) < 2
            and sum(1 for at_s, who in self.began if who == tenant and at_s > since_s) < 3
            and sum(tokens for at_s, who, tokens in self.spent if who == tenant and at_s > since_s) < 50
        )
        if fits:
            self.admission.begin(tenant, self.now_s)
            self.running.append(tenant)
            self.began.append((self.now_s, tenant))
        else:
            _, retry_after_s = refused(self.admission, tenant, self.now_s)
            assert retry_after_s is not None
            assert 1.0 <= retry_after_s <= 60.0

    @rule(at=st.integers(0, 3), tokens=st.integers(0, 30))
    def a_request_ends(self, at: int, tokens: int) -> None:
        if at < len(self.running):
            tenant = self.running.pop(at)
            self.admission.charge(tenant, tokens, self.now_s)
            self.spent.append((self.now_s, tenant, tokens))
            self.admission.end(tenant)

    @invariant()
    def what_is_in_flight_is_known(self) -> None:
        assert self.admission.in_flight == len(self.running)


Tenants.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTenants = Tenants.TestCase
