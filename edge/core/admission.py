"""How much a tenant, and everybody together, may have in flight and in a minute. Pure; time is an argument."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache

from edge.core.errors import Code, EdgeError
from edge.core.meter import Meter
from edge.core.types import Principal, TenantLimits

MAX_TENANTS = 65_536
"""Whose use is remembered. Beyond it the one that was looked at longest ago and has nothing in flight is forgotten."""
KNOWN_LIMITS = 1024
DEFAULT = TenantLimits(requests=1024)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`requests`: of everybody, on this edge. `tenant`: of each, on all `replicas` edges together."""

    requests: int = 8192
    tenant: TenantLimits = DEFAULT
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Quota:
    """Where a tenant stands with one limit: `remaining` of it now, all of it in `reset_s`."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """None: there is no such limit."""

    requests: Quota | None
    tokens: Quota | None


@dataclass(slots=True)
class _Tenant:
    """`prompt`: tokens of its last prompt, by which the next one's wait is told before it is read."""

    in_flight: int = 0
    requests: Meter = field(default_factory=Meter)
    tokens: Meter = field(default_factory=Meter)
    prompt: int = 1

    def is_idle(self, now_s: float) -> bool:
        return not (self.in_flight or self.requests.is_used(now_s) or self.tokens.is_used(now_s))


class Admission:
    """`begin` before a request is read, `prompt` once it is tokenized, `charge` as it is answered, `end` at its end.

    A principal's own limits come before the configured ones; both are the tenant's, and this edge gives its share of
    them. `refused`: how often, by the limit's name.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._replicas = limits.replicas
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._shares = lru_cache(KNOWN_LIMITS)(self._share)
        self.in_flight = 0
        self.refused: Counter[str] = Counter()

    @property
    def num_tenants(self) -> int:
        """Whose use is remembered."""
        return len(self._tenants)

    def share_with(self, replicas: int) -> None:
        """From now on `replicas` edges share the limits."""
        self._replicas = replicas
        self._shares.cache_clear()

    def begin(self, principal: Principal, now_s: float) -> None:
        """Raises EdgeError RATE_LIMITED or OVERLOADED, with when to come again; then nothing was counted."""
        if self.in_flight >= self._limits.requests:
            self.refused["requests"] += 1
            message = "The server is at its limit of requests."
            raise EdgeError(Code.OVERLOADED, message, retryable=True, retry_after_s=1.0, reason="requests")
        limits = self._shares(principal.limits)
        state = self._tenants.get(principal.tenant) or _Tenant()
        if limits.requests is not None and state.in_flight >= limits.requests:
            raise self._limited("tenant_requests", f"{limits.requests} requests at a time", 1.0)
        self._require_minute(state, limits, now_s)
        self._remember(principal.tenant, state, now_s)
        state.in_flight += 1
        self.in_flight += 1
        if limits.requests_per_minute is not None:
            state.requests.add(1, limits.requests_per_minute, now_s)

    def prompt(self, principal: Principal, tokens: int, now_s: float) -> None:
        """Charge a prompt. Raises EdgeError RATE_LIMITED, with when the same prompt may come again, or INVALID where it
        never may; then its tokens were not counted, but the request was."""
        limits = self._shares(principal.limits)
        limit = limits.tokens_per_minute
        if limit is None:
            return
        state = self._tenants[principal.tenant]
        if tokens > limit:
            self.refused["tenant_prompt"] += 1
            raise EdgeError(
                Code.INVALID,
                f"The prompt has {tokens} tokens, and this tenant's limit is {limit} tokens a minute: it is never "
                "served. Please shorten it.",
                reason="tenant_prompt",
            )
        state.prompt = max(1, tokens)
        wait_s = state.tokens.wait_s(tokens, limit, now_s)
        if wait_s:
            wait_s = max(wait_s, _wait_for_requests(state, limits, now_s))
            raise self._limited(
                "tenant_tokens_per_minute", f"{limit} tokens a minute, and the prompt has {tokens}", wait_s
            )
        state.tokens.add(tokens, limit, now_s)

    def charge(self, principal: Principal, tokens: int, now_s: float) -> None:
        """Tokens that were generated; they may go over the limit, which then makes the tenant wait."""
        limit = self._shares(principal.limits).tokens_per_minute
        if limit is not None:
            self._tenants[principal.tenant].tokens.add(tokens, limit, now_s)

    def end(self, principal: Principal) -> None:
        state = self._tenants.get(principal.tenant)
        assert state is not None, "a request ended that never began"
        assert state.in_flight > 0, "a request ended that never began"
        state.in_flight -= 1
        self.in_flight -= 1
        if state.is_idle(float("-inf")):
            del self._tenants[principal.tenant]

    def standing(self, principal: Principal, now_s: float) -> Standing:
        limits = self._shares(principal.limits)
        state = self._tenants.get(principal.tenant) or _Tenant()
        return Standing(
            _quota(state.requests, limits.requests_per_minute, now_s),
            _quota(state.tokens, limits.tokens_per_minute, now_s),
        )

    def _share(self, own: TenantLimits) -> TenantLimits:
        return own.over(self._limits.tenant).share(self._replicas)

    def _require_minute(self, state: _Tenant, limits: TenantLimits, now_s: float) -> None:
        """Room for one more request; for its tokens, as long as there are any left."""
        requests_s = _wait_for_requests(state, limits, now_s)
        tokens, tokens_s = limits.tokens_per_minute, 0.0
        if tokens is not None and state.tokens.left(tokens, now_s) == 0:
            tokens_s = state.tokens.wait_s(min(state.prompt, tokens), tokens, now_s)
        wait_s = max(requests_s, tokens_s)
        if requests_s:
            raise self._limited("tenant_requests_per_minute", f"{limits.requests_per_minute} requests a minute", wait_s)
        if tokens_s:
            raise self._limited("tenant_tokens_per_minute", f"{tokens} tokens a minute", wait_s)

    def _remember(self, tenant: str, state: _Tenant, now_s: float) -> None:
        """Of a new one, and look after some of those that there are, so that they stay few."""
        if tenant in self._tenants:
            return
        for _ in range(min(2, len(self._tenants))):
            self._look_after_oldest(now_s, forget=False)
        for _ in range(len(self._tenants)):
            if len(self._tenants) < MAX_TENANTS:
                break
            self._look_after_oldest(now_s, forget=True)
        self._tenants[tenant] = state

    def _look_after_oldest(self, now_s: float, *, forget: bool) -> None:
        tenant, state = next(iter(self._tenants.items()))
        if state.is_idle(now_s) or (forget and not state.in_flight):
            del self._tenants[tenant]
        else:
            self._tenants.move_to_end(tenant)

    def _limited(self, limit: str, what: str, wait_s: float) -> EdgeError:
        self.refused[limit] += 1
        return EdgeError(
            Code.RATE_LIMITED,
            f"This tenant is at its limit of {what}.",
            retryable=True,
            retry_after_s=max(1.0, math.ceil(wait_s)),
            reason=limit,
        )


def _wait_for_requests(state: _Tenant, limits: TenantLimits, now_s: float) -> float:
    limit = limits.requests_per_minute
    return 0.0 if limit is None else state.requests.wait_s(1, limit, now_s)


def _quota(meter: Meter, limit: int | None, now_s: float) -> Quota | None:
    return None if limit is None else Quota(limit, meter.left(limit, now_s), meter.reset_s(now_s))
