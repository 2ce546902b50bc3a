"""What a policy saved, and which one is in force, is told to the outside."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from worker.core.config import RetentionPolicy
from worker.core.ghosts import OTHERS, Uncached
from worker.retention_metrics import RetentionMetrics

PREFIX = "kinroute_worker_kv_retention_"


def test_saved_tokens_are_told_by_tenant_against_each_ghost() -> None:
    registry = CollectorRegistry()
    metrics = RetentionMetrics(registry)
    uncached = {b"\x0a": Uncached(1, real=70, lru=100, undemoted=60), OTHERS: Uncached(1, real=5, lru=5, undemoted=5)}

    metrics.watch(uncached)
    uncached[b"\x0a"] = Uncached(2, real=170, lru=150, undemoted=160)
    metrics.watch(uncached)
    metrics.watch(uncached)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + name, labels)

    assert value("saved_tokens", tenant="0a", against="lru") == -20
    assert value("saved_tokens", tenant="0a", against="no_demotion") == -10
    assert value("saved_tokens", tenant="others", against="lru") == 0
    caches = [value("uncached_tokens_total", tenant="0a", cache=cache) for cache in ("real", "lru", "no_demotion")]
    assert caches == [170, 150, 160]


def test_the_policy_in_force_is_one_and_its_changes_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = RetentionMetrics(registry)

    metrics.kept_by(RetentionPolicy.RETURN_INDEX)
    metrics.kept_by(RetentionPolicy.LRU)

    active = [registry.get_sample_value(PREFIX + "policy", {"policy": one}) for one in RetentionPolicy]
    assert active == [1, 0, 0]
    assert registry.get_sample_value(PREFIX + "switches_total") == 1
