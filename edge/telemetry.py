"""Logs on stderr and an edge's metrics. Neither ever holds a prompt or an answer."""

from __future__ import annotations

import logging
import sys

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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


class Metrics:
    """Counters of one edge, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kinroute_edge_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.active = Gauge("kinroute_edge_active_requests", "Requests being served.", registry=self.registry)
        self.disconnects = Counter(
            "kinroute_edge_disconnects", "Requests whose caller went away first.", registry=self.registry
        )
        self.slow_clients = Counter(
            "kinroute_edge_slow_clients", "Answers cancelled because their caller did not read.", registry=self.registry
        )
        self.first_token = Histogram(
            "kinroute_edge_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=TIME_BUCKETS_S,
            registry=self.registry,
        )
        self.duration = Histogram(
            "kinroute_edge_request_seconds",
            "From a request's arrival to its last byte.",
            buckets=TIME_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("kinroute_edge_prompt_tokens", "Prompt tokens served.", registry=self.registry)
        self.cached_tokens = Counter(
            "kinroute_edge_cached_tokens", "Prompt tokens whose KV was reused.", registry=self.registry
        )
        self.completion_tokens = Counter("kinroute_edge_completion_tokens", "Tokens answered.", registry=self.registry)

    def ended(self, path: str, status: int, duration_s: float) -> None:
        """Count a request of a hot route. `path` is the route's own, never what a caller wrote."""
        self.requests.labels(path, str(status)).inc()
        self.duration.observe(duration_s)
