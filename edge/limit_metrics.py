"""What the limits of tenants refused."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.core.admission import Admission


class LimitMetrics(Collector):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "kinroute_edge_limited", "Requests refused for a limit of their tenant or the edge.", labels=["limit"]
        )
        for limit, count in self._admission.refused.items():
            refused.add_metric([limit], count)
        yield refused
        yield GaugeMetricFamily(
            "kinroute_edge_limited_tenants", "Tenants whose use is remembered.", self._admission.num_tenants
        )
