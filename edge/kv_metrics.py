"""What the edge knows of its workers' caches, as metrics. Names and labels are stable: docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.core.fleet import Fleet
from edge.core.kv_index import FollowedWorker
from edge.core.resident import ResidentBlocks

PREFIX = "kinroute_edge_kv_"
LABELS = ["worker"]
NEVER_FOLLOWED = FollowedWorker(ResidentBlocks(0))
GAUGES: tuple[tuple[str, str, Callable[[FollowedWorker], int]], ...] = (
    ("known", "1: it is known what the worker's cache holds.", lambda one: int(one.is_up and one.complete)),
    ("blocks", "Blocks of the worker's cache in the index.", lambda one: len(one.blocks)),
    ("bytes", "Bytes that these take.", lambda one: one.blocks.num_bytes),
    ("thinning", "The index keeps one block in 2 to this power, and the ends and forks.", lambda one: one.blocks.level),
)
COUNTERS: tuple[tuple[str, str, Callable[[FollowedWorker], int]], ...] = (
    ("events", "KV events applied.", lambda one: one.events),
    ("snapshots", "Snapshots that came.", lambda one: one.snapshots),
    ("links", "Times that following the worker began.", lambda one: one.links),
    ("restarts", "Times that the worker was found to have started again.", lambda one: one.restarts),
    ("gaps", "Times that events were missing.", lambda one: one.gaps),
    ("unknown_parents", "Events about blocks behind one that is not known.", lambda one: one.unknown_parents),
)


class KvMetrics(Collector):
    """Read from the index when scraped. A series for each worker of the configuration, and no more."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        followed = self._fleet.kv.workers
        workers = [(worker_id, followed.get(worker_id, NEVER_FOLLOWED)) for worker_id in self._fleet.workers]
        for name, text, value in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            for worker_id, worker in workers:
                gauge.add_metric([worker_id], value(worker))
            yield gauge
        for name, text, value in COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            for worker_id, worker in workers:
                counter.add_metric([worker_id], value(worker))
            yield counter
