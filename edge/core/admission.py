"""How much a tenant, and everybody together, may have in flight. Pure; time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from edge.core.errors import Code, EdgeError

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """None is no limit. Tokens are those of the prompt, and those generated, charged when they are known."""

    requests: int = 8192
    tenant_requests: int = 1024
    tenant_requests_per_minute: int | None = None
    tenant_tokens_per_minute: int | None = None


@dataclass(slots=True)
class _Tenant:
    in_flight: int = 0
    began: deque[tuple[float, int]] = field(default_factory=deque)
    spent: deque[tuple[float, int]] = field(default_factory=deque)
    requests: int = 0
    tokens: int = 0


class Admission:
    """`begin` before a request is served, `charge` when tokens are known, `end` when it is over."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}
        self.in_flight = 0

    def begin(self, tenant: str, now_s: float) -> None:
        """Raises EdgeError RATE_LIMITED or OVERLOADED, with when to come again; then nothing was counted."""
        limits = self._limits
        if self.in_flight >= limits.requests:
            raise EdgeError(
                Code.OVERLOADED, "The server is at its limit of requests.", retryable=True, retry_after_s=1.0
            )
        state = self._tenants.get(tenant) or _Tenant()
        _forget_old(state, now_s)
        if state.in_flight >= limits.tenant_requests:
            raise _limited(f"{limits.tenant_requests} requests at a time", 1.0)
        if limits.tenant_requests_per_minute is not None and state.requests >= limits.tenant_requests_per_minute:
            over = state.requests - limits.tenant_requests_per_minute
            raise _limited(f"{limits.tenant_requests_per_minute} requests a minute", _until(state.began, over, now_s))
        if limits.tenant_tokens_per_minute is not None and state.tokens >= limits.tenant_tokens_per_minute:
            over = state.tokens - limits.tenant_tokens_per_minute
            raise _limited(f"{limits.tenant_tokens_per_minute} tokens a minute", _until(state.spent, over, now_s))
        self._tenants[tenant] = state
        state.in_flight += 1
        self.in_flight += 1
        if limits.tenant_requests_per_minute is not None:
            state.began.append((now_s, 1))
            state.requests += 1

    def charge(self, tenant: str, tokens: int, now_s: float) -> None:
        if self._limits.tenant_tokens_per_minute is not None:
            state = self._tenants[tenant]
            state.spent.append((now_s, tokens))
            state.tokens += tokens

    def end(self, tenant: str) -> None:
        state = self._tenants[tenant]
        assert state.in_flight > 0, "a request ended that never began"
        state.in_flight -= 1
        self.in_flight -= 1
        if not state.in_flight and not state.began and not state.spent:
            del self._tenants[tenant]


def _forget_old(state: _Tenant, now_s: float) -> None:
    while state.began and state.began[0][0] <= now_s - MINUTE_S:
        state.requests -= state.began.popleft()[1]
    while state.spent and state.spent[0][0] <= now_s - MINUTE_S:
        state.tokens -= state.spent.popleft()[1]


def _until(entries: deque[tuple[float, int]], over: int, now_s: float) -> float:
    """Seconds until more than `over` of what was counted is a minute old; a minute where it never will be."""
    for counted_s, count in entries:
        over -= count
        if over < 0:
            return max(1.0, counted_s + MINUTE_S - now_s)
    return MINUTE_S


def _limited(what: str, retry_after_s: float) -> EdgeError:
    return EdgeError(
        Code.RATE_LIMITED, f"This tenant is at its limit of {what}.", retryable=True, retry_after_s=retry_after_s
    )
