"""What was refused, and why: a line in the log and a counter each. Never a secret, never what a caller wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger()


class Audit(Collector):
    """`what` and `reason` are words of our own, so that the counters stay few."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused: Counter[tuple[str, str]] = Counter()
        self._ignored: Counter[tuple[str, str]] = Counter()
        registry.register(self)

    def refused(self, what: str, reason: str, *, tenant: str = "", key_id: str = "") -> None:
        """`what`: `credential`, `hint`, `token`, `control`. `key_id` names a key and is none."""
        self._refused[what, reason] += 1
        log.warning("refused", audit=what, reason=reason, tenant=tenant, key_id=key_id)

    def ignored(self, family: str, reason: str, *, tenant: str = "", key_id: str = "") -> None:
        """What an agent's own headers said of a parent or an end. They always say it: no line in the log by default."""
        self._ignored[family, reason] += 1
        log.debug("ignored", audit="hint", family=family, reason=reason, tenant=tenant, key_id=key_id)

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "kinroute_edge_refused", "Credentials, hints and tokens that were refused.", labels=["what", "reason"]
        )
        for (what, reason), count in self._refused.items():
            refused.add_metric([what, reason], count)
        yield refused
        ignored = CounterMetricFamily(
            "kinroute_edge_ignored_hints",
            "Parents and final marks in an agent's own headers that may not be believed.",
            labels=["family", "reason"],
        )
        for (family, reason), count in self._ignored.items():
            ignored.add_metric([family, reason], count)
        yield ignored
