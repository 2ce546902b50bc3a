"""What the retention policy saved or cost, and which is in force. Names and labels are stable: docs/operations.md."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from worker.cache_metrics import PREFIX, Total
from worker.core.config import RetentionPolicy
from worker.core.ghosts import OTHERS, Uncached

BASELINES = {"lru": "lru", "no_demotion": "undemoted"}
"""Label of each ghost, and its member of `Uncached`."""


class RetentionMetrics:
    """By tenant, of whom `Ghosts` tells so many apart; the label is the tag that the edge sends, which names nobody."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._saved = Gauge(
            PREFIX + "retention_saved_tokens",
            "Prompt tokens that the retention policy saved from being computed, below 0: that it cost.",
            ("tenant", "against"),
            registry=registry,
        )
        self._computed = Counter(
            PREFIX + "retention_uncached_tokens",
            "Prompt tokens that had to be computed here (real), or would have had to under another policy.",
            ("tenant", "cache"),
            registry=registry,
        )
        self._active = Gauge(
            PREFIX + "retention_policy", "1: blocks are kept by this policy.", ("policy",), registry=registry
        )
        self._switches = Counter(
            PREFIX + "retention_switches", "How often the guard changed the policy.", registry=registry
        )
        self._policy: RetentionPolicy | None = None
        self._totals: dict[tuple[bytes, str], Total] = {}
        self._told: dict[bytes, int] = {}

    def kept_by(self, policy: RetentionPolicy) -> None:
        """This one is in force from now on."""
        if self._policy is not None:
            self._switches.inc()
        self._policy = policy
        for one in RetentionPolicy:
            self._active.labels(one).set(one is policy)

    def watch(self, uncached: Mapping[bytes, Uncached]) -> None:
        """Totals by tenant; costs what changed since the last call."""
        for tenant, total in uncached.items():
            if self._told.get(tenant) == total.requests:
                continue
            self._told[tenant] = total.requests
            name = "others" if tenant == OTHERS else tenant.hex()
            for label, member in BASELINES.items():
                self._saved.labels(name, label).set(getattr(total, member) - total.real)
                self._total(tenant, name, label).tell(getattr(total, member))
            self._total(tenant, name, "real").tell(total.real)

    def _total(self, tenant: bytes, name: str, cache: str) -> Total:
        key = tenant, cache
        if key not in self._totals:
            self._totals[key] = Total(self._computed.labels(name, cache))
        return self._totals[key]
