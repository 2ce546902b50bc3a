"""The metrics of the KV cache, made of the totals that it keeps. Names and labels are stable: docs/operations.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from worker.core.stats import EVICTION_REASONS, CacheStats, PageCounts
from worker.core.tiers import Tier

PREFIX = "kinroute_worker_kv_"
STATES = ("free", "held", "cached", "moving")
NAMES = tuple(tier.name.lower() for tier in Tier)


class Total:
    """A counter that is told its total, which only rises."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._told = 0

    def tell(self, total: int) -> None:
        assert total >= self._told, f"a total fell from {self._told} to {total}"
        if total != self._told:
            self._counter.inc(total - self._told)
            self._told = total


class CacheMetrics:
    """`watch` is called on one thread, after each step, and takes some 10 µs; `pages` may be read on any.

    Every series is there from the start, at 0, but for those of a rank's failures.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pages: tuple[PageCounts, ...] = ()
        """Of each tier, as `watch` last heard; empty before."""
        self._registry = registry
        self._tokens_per_block = self._page_bytes = 0
        states = self._gauge("pages", "KV pages of a rank, by tier and state.", "tier", "state")
        sizes = self._gauge("tier_pages", "KV pages that a tier of a rank has.", "tier")
        off = self._gauge("tier_off", "1: the tier was switched off after its failures.", "tier")
        self._tiers = [
            {"total": sizes.labels(name), "off": off.labels(name)}
            | {state: states.labels(name, state) for state in STATES}
            for name in NAMES
        ]
        self._matched = self._by("matched_tokens", "Prompt tokens found in the cache.", "tier", NAMES)
        self._uncached = self._total("uncached_tokens", "Prompt tokens that no tier had.")
        self._evicted = self._by("evicted_pages", "Blocks dropped, by why.", "reason", EVICTION_REASONS)
        self._demoted = self._total("demoted_conversations", "Finished sub-agents demoted.")
        self._demoted_blocks = self._total("demoted_blocks", "Blocks that a demotion lowered.")
        self._restored = self._total("restored_conversations", "Demoted sub-agents that came back.")
        self._restored_blocks = self._total("restored_blocks", "Demoted blocks that got their priority back.")
        self._lapsed = self._total("lapsed_blocks", "Blocks whose retention ran out.")
        self._failed = self._by("copy_failures", "Copies that some rank could not carry out.", "tier", NAMES)
        self._moves = self._moving()
        self._rank_failures = self._counter(
            "rank_copy_failures", "Copies that a rank could not carry out.", "tier", "rank"
        )

    def opened(self, *, tokens_per_block: int, page_bytes: int) -> None:
        """What a block holds and a page of a rank takes; before the first `watch`."""
        self._tokens_per_block, self._page_bytes = tokens_per_block, page_bytes

    def watch(self, stats: CacheStats, pages: Sequence[PageCounts]) -> None:
        """`stats`: totals, of which what was told before is taken off. `pages`: of each tier, warm to cold."""
        self.pages = tuple(pages)
        for gauges, counts in zip(self._tiers, pages, strict=True):
            for member, gauge in gauges.items():
                gauge.set(getattr(counts, member))
        for name, blocks, failures in zip(NAMES, stats.matched_blocks, stats.copy_failures, strict=True):
            self._matched[name].tell(blocks * self._tokens_per_block)
            self._failed[name].tell(failures)
        for reason, evicted in stats.evicted_pages.items():
            self._evicted[reason].tell(evicted)
        for between, num_pages in stats.moved_pages.items():
            in_pages, in_bytes = self._moves[between]
            in_pages.tell(num_pages)
            in_bytes.tell(num_pages * self._page_bytes)
        self._uncached.tell(stats.uncached_tokens)
        self._demoted.tell(stats.demoted_conversations)
        self._demoted_blocks.tell(stats.demoted_blocks)
        self._restored.tell(stats.restored_conversations)
        self._restored_blocks.tell(stats.restored_blocks)
        self._lapsed.tell(stats.lapsed_blocks)

    def copy_failed(self, tier: Tier, rank: int) -> None:
        """Rank `rank` could not carry out a copy to or from `tier`. From any thread."""
        self._rank_failures.labels(tier.name.lower(), str(rank)).inc()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _total(self, name: str, text: str) -> Total:
        return Total(self._counter(name, text))

    def _by(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Total]:
        counter = self._counter(name, text, label)
        return {value: Total(counter.labels(value)) for value in values}

    def _moving(self) -> dict[tuple[Tier, Tier], tuple[Total, Total]]:
        """Pages and bytes of each direction: towards a colder tier is offload, back is onboard."""
        found: dict[tuple[Tier, Tier], tuple[Total, Total]] = {}
        for kind, way in (("offload", "to a colder tier"), ("onboard", "to a warmer tier")):
            in_pages = self._counter(f"{kind}_pages", f"Pages that a rank moved {way}.", "source", "target")
            in_bytes = self._counter(f"{kind}_bytes", f"Bytes that a rank moved {way}.", "source", "target")
            for source in Tier:
                for target in Tier:
                    if source != target and (target > source) == (kind == "offload"):
                        names = source.name.lower(), target.name.lower()
                        found[source, target] = Total(in_pages.labels(*names)), Total(in_bytes.labels(*names))
        return found
