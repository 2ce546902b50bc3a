"""What real ranks record: it replays after they ended, and says why they did."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.openengine_client import Engine
from enginelink.v1 import link_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import Edge
from tests.worker.odd_ranks import READY_S, two_ranks
from tests.worker.running import MODEL_NAME, worker
from worker.exits import ExitCode
from worker.recording_ring import latest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def replayed(place: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `kinroute replay-recording`."""
    command = [sys.executable, "-m", "kinroute", "replay-recording", str(place), "--check", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def test_a_group_that_lost_a_rank_names_its_recording_and_the_next_one_records_on(tmp_path: Path, model: Path) -> None:
    cache = {"tokens_per_block": 4, "max_tokens": 4096, "recording_dir": str(tmp_path)}
    with worker(tmp_path / "files", model, tensor_parallel_size=2, kv_cache_config=cache) as running:
        running.wait_for("ready")
        running.engine.answer([1, 2, 3], 6)
        running.ranks()[1].kill()
        lost = Path(running.wait_for("restarting").members["recording"])
        running.wait_for("ready", count=2)
        for prompt in ([1, 2, 3], [1, 2, 3, 4, 5, 6], [7]):
            running.engine.answer(prompt, 6)
    first, second = latest(tmp_path)[::-1]

    code, told = replayed(first)
    assert (first, code, told["requests"]) == (lost, 0, 1)
    assert re.search("rank 1 is (gone|lost)", told["failure"]["why"])
    code, told = replayed(tmp_path)
    assert (told["file"], code, told["requests"], told["failure"]) == (str(second), 0, 3, None)
    assert told["worker"]["ranks"] == 2


def steps_of_one_request(edge: Edge) -> list[link_pb2.Step]:
    """Those that told of it, up to its error."""
    told = []
    for step in edge.steps():
        if step.handles or step.events:
            told.append(step)
        if any(event.WhichOneof("event") == "error" for event in step.events):
            break
    return told


@pytest.mark.parametrize("corrupted", [0, 1])
def test_a_recording_names_the_step_in_which_one_rank_decided_otherwise(
    tmp_path: Path, model: Path, corrupted: int
) -> None:
    """And no token of it left. If it was rank 0, its recording does not do the same again."""
    cache = {"tokens_per_block": 4, "max_tokens": 4096, "recording_dir": str(tmp_path)}
    wrong = ("tests.worker.corrupted_rank", "8")
    with two_ranks(tmp_path, model, corrupted, wrong, kv_cache_config=cache) as ranks:
        Engine(ranks.grpc, MODEL_NAME).answer([1, 2, 3], 2)
        with Edge(ranks.grpc) as edge:
            edge.submit([5, 6, 7, 8, 9], link_pb2.PHASE_AGGREGATED, 24)
            steps = steps_of_one_request(edge)
        assert ranks.processes[0].wait(READY_S) == ExitCode.FAILED
    code, told = replayed(tmp_path)

    failure, last = told["failure"], steps[-1].events[-1]
    assert failure["plan"] >= 8
    assert 4 <= steps[-2].number < failure["plan"]
    assert not steps[-1].handles
    assert failure["why"] == last.error.message
    assert last.error.retryable
    assert failure["rank"] == 1
    assert [one[0] for one in failure["ours"]] == [failure["plan"]] * len(failure["theirs"])
    assert failure["ours"] != failure["theirs"]
    assert str(tmp_path / "0") not in last.error.message
    assert str(tmp_path / "0") in ranks.log(0)
    if corrupted == 0:
        assert (code, told["differs"]["plan"]) == (1, failure["plan"])
        assert [list(one) for one in told["differs"]["decisions"]] == failure["theirs"]
    else:
        assert (code, told["differs"]) == (0, None)
