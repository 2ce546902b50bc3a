"""The metrics of KV events: what is kept of them, who follows, and who was too slow. Names and labels are stable:
docs/operations.md."""

from __future__ import annotations

import enum
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

PREFIX = "kinroute_worker_kv_"


class Spoken(enum.StrEnum):
    ENGINELINK = "enginelink"
    OPENENGINE = "openengine"


class Drop(enum.StrEnum):
    """Why a follower lost its place. `BEHIND`: what it was to read next is not kept any more; an edge gets a snapshot
    instead, a subscriber is ended. `UNREAD`: a subscriber read nothing for too long. `FULL`: there were too many."""

    BEHIND = "behind"
    UNREAD = "unread"
    FULL = "full"


class KvEventMetrics:
    """Fed on the event loop. Every series is there from the start, at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events = Counter(PREFIX + "events", "KV events put into the log.", registry=registry)
        self.snapshots = Counter(PREFIX + "event_snapshots", "Snapshots taken for followers.", registry=registry)
        self.batches = Gauge(PREFIX + "event_batches", "Batches of KV events that are kept.", registry=registry)
        self.bytes = Gauge(PREFIX + "event_bytes", "Bytes that these take.", registry=registry)
        self._followers = Gauge(PREFIX + "followers", "Who follows the KV events.", ["protocol"], registry=registry)
        self._dropped = Counter(
            PREFIX + "followers_dropped",
            "Followers that lost their place, by why.",
            ["protocol", "why"],
            registry=registry,
        )
        for protocol in Spoken:
            self._followers.labels(protocol)
            for why in Drop:
                if protocol is Spoken.OPENENGINE or why is Drop.BEHIND:
                    self._dropped.labels(protocol, why)

    def count_followers(self, protocol: Spoken, count: Callable[[], int]) -> None:
        """`count` is asked when the metrics are read."""
        self._followers.labels(protocol).set_function(count)

    def dropped(self, protocol: Spoken, why: Drop) -> None:
        self._dropped.labels(protocol, why).inc()
