"""What an edge tells of its workers' caches: under names that do not change, and for no more than its workers."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from edge.core.fleet import Fleet
from edge.core.kv_index import KvBatch, Stored
from edge.core.resident import Held
from edge.core.types import WorkerId
from edge.kv_metrics import KvMetrics
from tests.edge.core.kv_caches import key_of, keys_of

WORKER, OTHER = WorkerId("a:1"), WorkerId("b:1")
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def snapshot(epoch: str, sequence: int, *path: int) -> KvBatch:
    stored = Stored(b"", keys_of(path), Held.DEVICE, True)
    return KvBatch(epoch, sequence, [stored], snapshot=True, begin=True, end=True)


def shown(fleet: Fleet, worker_id: WorkerId) -> dict[str, float]:
    """Each metric of the worker that is not 0, without its prefix; but for bytes."""
    registry = CollectorRegistry()
    registry.register(KvMetrics(fleet))
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {
        sample.name.removeprefix("kinroute_edge_kv_"): sample.value
        for sample in samples
        if sample.labels == {"worker": worker_id} and sample.value and not sample.name.endswith("_bytes")
    }


def test_a_worker_that_is_followed_shows_what_is_known_and_what_came() -> None:
    fleet = Fleet([WORKER], [OTHER])
    fleet.follow(WORKER, "one")
    fleet.fed(WORKER, snapshot("one", 5, 1, 2))
    fleet.fed(WORKER, KvBatch("one", 6, [Stored(key_of([1, 2]), keys_of([1, 2, 3], 2), Held.DEVICE, False)]))

    assert shown(fleet, WORKER) == {"known": 1, "blocks": 3, "events_total": 2, "snapshots_total": 1, "links_total": 1}
    assert shown(fleet, OTHER) == {}, "it is there, at 0"


def test_what_goes_wrong_is_counted() -> None:
    fleet = Fleet([WORKER], [WORKER])
    fleet.follow(WORKER, "one")
    fleet.fed(WORKER, snapshot("one", 5, 1))
    fleet.fed(WORKER, KvBatch("one", 6, [Stored(key_of([7, 8]), keys_of([7, 8, 9], 2), Held.DEVICE, False)]))
    fleet.fed(WORKER, KvBatch("one", 8, []))
    fleet.unfollow(WORKER)
    assert shown(fleet, WORKER)["unknown_parents_total"] == 1
    assert shown(fleet, WORKER)["gaps_total"] == 1
    assert "known" not in shown(fleet, WORKER)

    fleet.follow(WORKER, "two")
    assert shown(fleet, WORKER)["restarts_total"] == 1
    assert shown(fleet, WORKER)["links_total"] == 2
    assert "blocks" not in shown(fleet, WORKER), "no ghosts"


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    registry = CollectorRegistry()
    registry.register(KvMetrics(Fleet([WORKER], [WORKER])))
    lines = generate_latest(registry).decode().splitlines()
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}

    rows = [line for line in OPERATIONS.read_text().splitlines() if line.startswith("| `kinroute_edge_kv_")]
    assert {row.split("`")[1].split("{")[0] for row in rows} == names
