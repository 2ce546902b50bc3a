"""Finished sub-agents on real ranks: processes with hash seeds of their own, over a real link with signed lineage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from enginelink.v1 import link_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import Edge, until
from tests.worker.running import Running, worker
from tests.worker.signed import ask, write_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BLOCK = 4
NUM_PAGES = 64
BOUND = 8
LOW = 1
DEMOTED = "kinroute_worker_kv_demoted_conversations_total"
DEMOTED_BLOCKS = "kinroute_worker_kv_demoted_blocks_total"
RESTORED = "kinroute_worker_kv_restored_conversations_total"
SAVED = "kinroute_worker_kv_retention_saved_tokens"
MISMATCHES = "kinroute_worker_digest_mismatches_total"


def blocks(first: int, count: int) -> list[int]:
    """Tokens of `count` blocks that no other `first` begins."""
    return [first + at % 7 for at in range(count * BLOCK)]


def family(running: Running) -> dict[str, dict[str, Any]]:
    told = running.get("/kinroute/v1/families?family=parent")["conversations"]
    return {one["conversation"]: one for one in told}


def wait_until_idle(running: Running, *conversations: str) -> None:
    """The worker makes plans without work until its children are old enough."""
    until(lambda: all((family(running)[one]["idle_steps"] or 0) >= BOUND - 1 for one in conversations))


@contextmanager
def started(folder: Path, ranks: int) -> Iterator[Running]:
    cache = {
        "tokens_per_block": BLOCK,
        "max_tokens": NUM_PAGES * BLOCK,
        "block_reuse_config": {
            "policy": "per_conversation",
            "finished_subagent_priority": LOW,
            "finished_subagent_min_idle_iterations": BOUND,
        },
    }
    model = make_tiny_model(folder / "model", num_attention_heads=6, num_key_value_heads=3)
    keys = write_keys(folder / "keys.json")
    with worker(folder, model, tensor_parallel_size=ranks, kv_cache_config=cache, keys_file=str(keys)) as running:
        yield running


@pytest.mark.parametrize("ranks", [2, 3])
def test_finished_subagent_demotion_is_rank_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The survivors are the stranger, older than everybody, and what both children share: an order by last use would
    have taken both before the children's own blocks."""
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    stranger, parent = [*blocks(20, 10), 1], [*blocks(40, 4), 2]
    task = [*blocks(40, 4), *blocks(60, 4)]
    one, two = [*task, *blocks(80, 8), 1], [*task, *blocks(100, 8), 1]
    with started(tmp_path, ranks) as running, Edge(running.grpc) as edge:
        ask(edge, "stranger", stranger)
        ask(edge, "parent", parent)
        assert ask(edge, "one", one, "parent") == 4 * BLOCK
        assert ask(edge, "two", two, "parent") == 8 * BLOCK
        wait_until_idle(running, "one", "two")

        ask(edge, "parent", [*parent[:-1], *blocks(120, 2), 3])

        until(lambda: family(running)["parent"]["state"] == "idle")
        told = family(running)
        assert {name: told[name]["state"] for name in ("parent", "one", "two")} == {
            "parent": "idle",
            "one": "demoted",
            "two": "demoted",
        }
        assert (told["one"]["blocks"]["device"], told["one"]["priority"]) == (12, [LOW, 35])
        assert (told["two"]["blocks"]["device"], told["two"]["priority"]) == (8, [LOW, LOW])
        assert (running.metric(DEMOTED), running.metric(DEMOTED_BLOCKS)) == (2, 16)

        ask(edge, "presser", [*blocks(140, 40), 1])
        assert ask(edge, "stranger", stranger) == 10 * BLOCK
        assert ask(edge, "one", one, "parent") == 8 * BLOCK
        assert family(running)["one"]["state"] == "idle"
        assert running.metric(RESTORED) == 1
        assert running.metric(SAVED, against="lru") == 10 * BLOCK, "the stranger's"

        wait_until_idle(running, "one")
        ask(edge, "parent", [*parent[:-1], *blocks(120, 4), 3])
        assert family(running)["one"]["state"] == "demoted"
        assert running.metric(DEMOTED) == 3
        assert running.metric(MISMATCHES) == 0
        assert len(running.ranks()) == ranks
        assert not [news for news in running.heard if news.event == "restarting"]
        running.wait_clean()


def test_a_generation_leg_elsewhere_keeps_a_child_in_flight_until_it_ended_or_its_link_is_lost(tmp_path: Path) -> None:
    child = [*blocks(40, 4), 1]
    with started(tmp_path, 1) as running:
        with Edge(running.grpc) as edge:
            for name in ("one", "two"):
                ask(edge, name, child, "parent")
                edge.tell(name, generating=link_pb2.Generating())
            until(lambda: [family(running)[name]["state"] for name in ("one", "two")] == ["running"] * 2)

            edge.tell("one", ended=link_pb2.Ended(reason=link_pb2.STOP_REASON_END_OF_TURN, final=True))
            until(lambda: family(running)["one"]["state"] == "final")
            assert family(running)["two"]["state"] == "running"

        until(lambda: family(running)["two"]["state"] == "idle")
        assert family(running)["one"]["state"] == "final"
