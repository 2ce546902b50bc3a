"""Logs on stderr and an edge's metrics. Neither ever holds a prompt or an answer."""

from __future__ import annotations

import bisect
import itertools
import logging
import sys
from collections.abc import Iterator

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.settings import Log

TIME_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


def configure_logs(log: Log, **bound: object) -> None:
    """Every later log line of this process carries `bound`."""
    level = logging.getLevelNamesMapping()[log.level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log.format == "json" else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
    logging.basicConfig(handlers=[_ToStructlog()], level=max(level, logging.WARNING), force=True)


class _ToStructlog(logging.Handler):
    """Libraries' own log lines, in the form of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger().bind(library=record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


class Metrics(Collector):
    """Counters of one edge, in a registry of their own.

    A request touches a dozen of them, so they are plain numbers here and become Prometheus' objects when scraped.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.active = 0
        self.disconnects = 0
        self.slow_clients = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.first_token = Times()
        self.duration = Times()
        self._requests: dict[tuple[str, int], int] = {}
        self.registry.register(self)

    def ended(self, path: str, status: int, duration_s: float) -> None:
        """Count a request of a hot route. `path` is the route's own, never what a caller wrote."""
        self._requests[path, status] = self._requests.get((path, status), 0) + 1
        self.duration.observe(duration_s)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "kinroute_edge_requests", "Requests answered, by route and status.", labels=["route", "status"]
        )
        for (path, status), count in self._requests.items():
            requests.add_metric([path, str(status)], count)
        yield requests
        yield GaugeMetricFamily("kinroute_edge_active_requests", "Requests being served.", self.active)
        for name, text, count in (
            ("disconnects", "Requests whose caller went away first.", self.disconnects),
            ("slow_clients", "Answers cancelled because their caller did not read.", self.slow_clients),
            ("prompt_tokens", "Prompt tokens served.", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens whose KV was reused.", self.cached_tokens),
            ("completion_tokens", "Tokens answered.", self.completion_tokens),
        ):
            yield CounterMetricFamily(f"kinroute_edge_{name}", text, count)
        yield self.first_token.family(
            "kinroute_edge_first_token_seconds", "From a request's arrival to its first token."
        )
        yield self.duration.family("kinroute_edge_request_seconds", "From a request's arrival to its last byte.")


class Times:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(TIME_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, time_s: float) -> None:
        self._counts[bisect.bisect_left(TIME_BUCKETS_S, time_s)] += 1
        self._sum_s += time_s

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        bounds = [*map(str, TIME_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum_s)
