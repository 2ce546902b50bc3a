"""What real ranks record: it replays after they ended, and says why they did."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.openengine_client import Engine
from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request, until
from tests.worker.running import MODEL_NAME, worker
from worker.exits import ExitCode
from worker.recording_ring import latest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
READY_S = 90.0


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


@contextmanager
def ranks_with_one_corrupted(folder: Path, model: Path, corrupted: int, plan: int) -> Iterator[tuple[str, list[Any]]]:
    """Two ranks as torchrun starts them; yields where rank 0 serves, and their processes."""
    ports = [free_port() for _ in range(4)]
    (folder / "token").write_text("t" * 32)
    file = folder / "worker.yaml"
    config = {
        "model": str(model),
        "served_model_name": MODEL_NAME,
        "tensor_parallel_size": 2,
        "listen": {"grpc": f"127.0.0.1:{ports[0]}", "admin": f"127.0.0.1:{ports[1]}"},
        "group": {"control_port": ports[2], "token_file": str(folder / "token")},
        "device": "cpu",
        "dtype": "float32",
        "threads_per_rank": 1,
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 4096, "recording_dir": str(folder)},
    }
    file.write_text(yaml.safe_dump(config))
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[3])}
    sound = [sys.executable, "-m", "kinroute", "worker", "--config", str(file)]
    wrong = [sys.executable, "-m", "tests.worker.corrupted_rank", str(file), str(plan)]
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            log = stack.enter_context((folder / f"rank-{rank}.log").open("wb"))
            place = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = wrong if rank == corrupted else sound
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | place)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        until(lambda: is_ready(ports[1]), READY_S)
        yield f"127.0.0.1:{ports[0]}", ranks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("corrupted", [0, 1])
def test_a_recording_names_the_step_in_which_one_rank_decided_otherwise(
    tmp_path: Path, model: Path, corrupted: int
) -> None:
    """If it was rank 0, its recording does not do the same again."""
    with ranks_with_one_corrupted(tmp_path, model, corrupted, plan=4) as (grpc, ranks):
        Engine(grpc, MODEL_NAME).answer([1, 2, 3], 2)
        with OpenEngine(grpc) as client:
            last = client.answer(generate_request([5, 6, 7, 8, 9], 8))[-1]
        assert ranks[0].wait(READY_S) == ExitCode.FAILED
    code, told = replayed(tmp_path)

    failure = told["failure"]
    assert failure["plan"] >= 4
    assert failure["why"] == last.error.message
    assert last.error.retryable
    assert failure["rank"] == 1
    assert [one[0] for one in failure["ours"]] == [failure["plan"]] * len(failure["theirs"])
    assert failure["ours"] != failure["theirs"]
    assert str(tmp_path / "0") not in last.error.message
    assert str(tmp_path / "0") in (tmp_path / "rank-0.log").read_text()
    if corrupted == 0:
        assert (code, told["differs"]["plan"]) == (1, failure["plan"])
        assert [list(one) for one in told["differs"]["decisions"]] == failure["theirs"]
    else:
        assert (code, told["differs"]) == (0, None)
