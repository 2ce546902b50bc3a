"""What the cache counts is told to the outside under names that do not change."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from worker.cache_metrics import CacheMetrics
from worker.core.stats import BELOW_THRESHOLD, CAPACITY, CacheStats, PageCounts
from worker.core.tiers import Tier
from worker.telemetry import Metrics

PREFIX = "kinroute_worker_kv_"
NO_PAGES = [PageCounts(), PageCounts(), PageCounts()]
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def opened(registry: CollectorRegistry) -> CacheMetrics:
    metrics = CacheMetrics(registry)
    metrics.opened(tokens_per_block=4, page_bytes=100)
    return metrics


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, labels)


def test_pages_are_shown_by_tier_and_state() -> None:
    registry = CollectorRegistry()
    metrics = opened(registry)

    counts = [PageCounts(9, free=1, held=2, cached=3, moving=4), PageCounts(5, free=5), PageCounts(7, off=True)]
    metrics.watch(CacheStats(), counts)

    states = [value(registry, "pages", tier="device", state=state) for state in ("free", "held", "cached", "moving")]
    assert states == [1, 2, 3, 4]
    assert [value(registry, "tier_pages", tier=tier) for tier in ("device", "host", "disk")] == [9, 5, 7]
    assert [value(registry, "tier_off", tier=tier) for tier in ("device", "host", "disk")] == [0, 0, 1]
    assert metrics.pages == tuple(counts)


def test_totals_are_told_once_however_often_they_are_watched() -> None:
    registry = CollectorRegistry()
    metrics = opened(registry)
    stats = CacheStats(matched_blocks=[3, 2, 1], uncached_tokens=10, demoted_conversations=1, demoted_blocks=6)
    stats.evicted_pages[CAPACITY] = 2

    for _ in range(3):
        metrics.watch(stats, NO_PAGES)
    stats.matched_blocks[Tier.HOST] += 5
    stats.evicted_pages[BELOW_THRESHOLD] += 1
    metrics.watch(stats, NO_PAGES)

    matched = [value(registry, "matched_tokens_total", tier=tier) for tier in ("device", "host", "disk")]
    assert matched == [3 * 4, 7 * 4, 1 * 4]
    assert value(registry, "uncached_tokens_total") == 10
    assert value(registry, "evicted_pages_total", reason="capacity") == 2
    assert value(registry, "evicted_pages_total", reason="below_threshold") == 1
    assert value(registry, "demoted_conversations_total") == 1
    assert value(registry, "demoted_blocks_total") == 6


def test_moves_are_told_in_pages_and_bytes_by_direction() -> None:
    registry = CollectorRegistry()
    metrics = opened(registry)
    stats = CacheStats()

    stats.moved(Tier.DEVICE, Tier.HOST, 3)
    stats.moved(Tier.DISK, Tier.DEVICE, 2)
    metrics.watch(stats, NO_PAGES)
    stats.moved(Tier.DEVICE, Tier.HOST, 1)
    metrics.watch(stats, NO_PAGES)

    assert value(registry, "offload_pages_total", source="device", target="host") == 4
    assert value(registry, "offload_bytes_total", source="device", target="host") == 400
    assert value(registry, "onboard_pages_total", source="disk", target="device") == 2
    assert value(registry, "onboard_bytes_total", source="disk", target="device") == 200


def test_a_failed_copy_names_the_tier_and_the_rank() -> None:
    registry = CollectorRegistry()
    metrics = opened(registry)

    metrics.copy_failed(Tier.DISK, 1)
    metrics.copy_failed(Tier.DISK, 1)

    assert value(registry, "rank_copy_failures_total", tier="disk", rank="1") == 2


def test_a_total_that_falls_is_a_broken_promise() -> None:
    metrics = opened(CollectorRegistry())
    metrics.watch(CacheStats(uncached_tokens=5), NO_PAGES)

    with pytest.raises(AssertionError, match="fell from 5 to 4"):
        metrics.watch(CacheStats(uncached_tokens=4), NO_PAGES)


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    shown = {
        line.split()[2]
        for line in generate_latest(Metrics().registry).decode().splitlines()
        if line.startswith("# TYPE") and not line.split()[2].endswith("_created")
    }

    documented = {
        line.split("`")[1].split("{")[0]
        for line in OPERATIONS.read_text().splitlines()
        if line.startswith("| `kinroute_worker_")
    }

    assert documented == shown
