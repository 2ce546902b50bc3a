"""Logs on stderr and a worker's metrics."""

from __future__ import annotations

import logging
import sys

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from worker.cache_metrics import CacheMetrics
from worker.core.step_load import StepLoad
from worker.kv_event_metrics import KvEventMetrics
from worker.retention_metrics import RetentionMetrics
from worker.settings import Log

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def configure_logs(log: Log, **bound: object) -> None:
    """Every later log line of this process carries `bound`."""
    level = logging.getLevelNamesMapping()[log.level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log.format == "json" else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            lambda logger, name, event: {**event, **bound},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class Metrics:
    """Counters of rank 0, in a registry of their own. Names and labels are stable: docs/operations.md."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kinroute_worker_requests", "Requests accepted, by phase.", ["phase"], registry=self.registry
        )
        self.endings = Counter("kinroute_worker_endings", "Requests ended, by how.", ["how"], registry=self.registry)
        self.prompt_tokens = Counter(
            "kinroute_worker_prompt_tokens",
            "Prompt tokens, by where their KV came from.",
            ["source"],
            registry=self.registry,
        )
        self.output_tokens = Counter("kinroute_worker_output_tokens", "Tokens sampled.", registry=self.registry)
        self.steps = Histogram(
            "kinroute_worker_step_seconds", "One engine step.", buckets=STEP_BUCKETS_S, registry=self.registry
        )
        self.forwards = Summary(
            "kinroute_worker_forward_seconds", "One engine step that computes something.", registry=self.registry
        )
        computed = Counter(
            "kinroute_worker_computed_tokens", "Tokens computed, by kind.", ["kind"], registry=self.registry
        )
        attended = Counter(
            "kinroute_worker_attended_tokens",
            "Tokens of context that computed tokens looked at, by kind of those.",
            ["kind"],
            registry=self.registry,
        )
        self._computed = [(computed.labels(kind), attended.labels(kind)) for kind in ("prefill", "decode")]
        self.running = Gauge("kinroute_worker_running_requests", "Requests being computed.", registry=self.registry)
        self.queued = Gauge("kinroute_worker_queued_requests", "Requests waiting.", registry=self.registry)
        self.used_pages = Gauge("kinroute_worker_used_pages", "KV pages in use.", registry=self.registry)
        self.total_pages = Gauge("kinroute_worker_total_pages", "KV pages of a rank.", registry=self.registry)
        self.overloads = Counter(
            "kinroute_worker_slow_consumers",
            "Edges or callers cut off because they did not read.",
            registry=self.registry,
        )
        self.suspended = Gauge(
            "kinroute_worker_suspended_requests", "Requests that wait for pages to go on.", registry=self.registry
        )
        self.mismatches = Counter(
            "kinroute_worker_digest_mismatches", "Plans in which ranks decided differently.", registry=self.registry
        )
        self.recording_on = Gauge(
            "kinroute_worker_recording_on", "1: plans are being recorded.", registry=self.registry
        )
        self.recording_dropped = Counter(
            "kinroute_worker_recording_dropped_plans",
            "Plans that were not recorded, as writing fell behind or failed.",
            registry=self.registry,
        )
        self.num_mismatches = 0
        self.cache = CacheMetrics(self.registry)
        self.retention = RetentionMetrics(self.registry)
        self.kv_events = KvEventMetrics(self.registry)

    def count_forward(self, load: StepLoad, took_s: float) -> None:
        """A step computed this."""
        self.forwards.observe(took_s)
        for (computed, attended), tokens, context in zip(
            self._computed,
            (load.prefill_tokens, load.decode_tokens),
            (load.prefill_context, load.decode_context),
            strict=True,
        ):
            computed.inc(tokens)
            attended.inc(context)

    def count_mismatches(self, count: int = 1) -> None:
        """Also those of the groups before this one: a group ends at its first."""
        self.num_mismatches += count
        self.mismatches.inc(count)
