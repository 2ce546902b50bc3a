"""Two ranks of which one copies late and lives an hour ahead: they serve families and decide alike."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model
from tests.worker.clients import Edge
from tests.worker.late_rank import LONG_DELAYS
from tests.worker.odd_ranks import Ranks, two_ranks
from tests.worker.running import metric_of
from tests.worker.signed import ask, write_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BLOCK = 4
FAMILIES = 10
TURNS = 50
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * BLOCK
"""Of the rank with more heads: layers, keys and values, heads, head size, float32, tokens."""


def play(ranks: Ranks, number: int) -> int:
    """One family's turns, one after the other: a parent, its sub-agents, and theirs. How many tokens were cached."""
    dice = random.Random(number)
    names = [f"{number}", f"{number}/a", f"{number}/b", f"{number}/a/c"]
    parents = dict(zip(names, ["", names[0], names[0], names[1]], strict=True))
    begin = [dice.randrange(3, 250) for _ in range(8 * BLOCK)]
    prompts = {name: [*begin, *(dice.randrange(3, 250) for _ in range(dice.randrange(60)))] for name in names}
    cached = 0
    with Edge(ranks.grpc) as edge:
        for _ in range(TURNS):
            name = dice.choice(names)
            prompt = prompts[name]
            if len(prompt) > 300:
                del prompt[len(begin) :]
            prompt += [dice.randrange(3, 250) for _ in range(dice.randrange(1, 40))]
            cached += ask(edge, name, prompt, parents[name], family=names[0])
    return cached


def test_copies_that_are_late_on_one_rank_and_a_clock_an_hour_off_change_no_decision(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", num_attention_heads=6, num_key_value_heads=3)
    (tmp_path / "disk").mkdir()
    (tmp_path / "recordings").mkdir()
    cache = {
        "tokens_per_block": BLOCK,
        "max_tokens": 400 * BLOCK,
        "host_cache_size": 2 * 200 * PAGE_BYTES,
        "disk_cache_size": 2 * 1000 * PAGE_BYTES,
        "disk_cache_path": str(tmp_path / "disk"),
        "recording_dir": str(tmp_path / "recordings"),
        "block_reuse_config": {
            "policy": "per_conversation",
            "finished_subagent_priority": 30,
            "finished_subagent_min_idle_iterations": 8,
        },
    }
    keys = write_keys(tmp_path / "keys.json")
    late = ("tests.worker.late_rank", "1")
    with two_ranks(tmp_path, model, 1, late, kv_cache_config=cache, keys_file=str(keys)) as ranks:
        with ThreadPoolExecutor(FAMILIES) as pool:
            cached = sum(pool.map(lambda number: play(ranks, number), range(FAMILIES)))

        with urllib.request.urlopen(f"http://{ranks.admin}/metrics", timeout=30.0) as answer:
            metrics = answer.read().decode()
        assert [process.poll() for process in ranks.processes] == [None, None]
    said = ranks.log(1)
    replay = [sys.executable, "-m", "kinroute", "replay-recording", str(tmp_path / "recordings"), "--json"]
    replayed = json.loads(subprocess.run(replay, capture_output=True, text=True, check=True).stdout)

    assert f"long delay {LONG_DELAYS}" in said
    assert replayed["differs"] is None
    assert cached > 0
    assert metric_of(metrics, "kinroute_worker_digest_mismatches_total") == 0
    assert metric_of(metrics, "kinroute_worker_kv_demoted_conversations_total") > 0
    assert metric_of(metrics, "kinroute_worker_kv_restored_conversations_total") > 0
    for source in ("host", "disk"):
        assert metric_of(metrics, "kinroute_worker_kv_onboard_pages_total", source=source) > 0
