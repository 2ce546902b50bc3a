"""A worker's processes: they start together, end together, and come back when one is lost."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request
from tests.worker.running import worker
from worker.core.recording import read
from worker.exits import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
GONE_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_lost_rank_ends_the_group_and_the_next_one_answers_alike(tmp_path: Path, model: Path) -> None:
    with worker(tmp_path, model, tensor_parallel_size=2) as running:
        running.wait_for("ready")
        before = running.engine.answer([1, 2, 3], 6)
        old = running.ranks()

        old[1].kill()

        assert "rank 1" in running.wait_for("restarting").members["why"]
        running.wait_for("ready", count=2)
        psutil.wait_procs(old, GONE_S)
        assert not any(process.is_running() for process in old)
        assert running.engine.answer([1, 2, 3], 6) == before


def test_a_stuck_rank_ends_the_group(tmp_path: Path, model: Path) -> None:
    group = {"report_timeout_s": 1.0, "step_timeout_s": 2.0}
    with worker(tmp_path, model, tensor_parallel_size=2, group=group) as running:
        running.wait_for("ready")

        running.ranks()[1].suspend()
        with OpenEngine(running.grpc) as client:
            last = client.answer(generate_request([1, 2, 3]))[-1]

        assert last.error.retryable
        assert re.search("rank 1 has not reported|in one step for more than", last.error.message)
        failure = read(Path(running.wait_for("restarting").members["recording"]).read_bytes()).failure
        assert failure is not None
        assert failure.why == last.error.message
        running.wait_for("ready", count=2)


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path, model: Path) -> None:
    with worker(tmp_path, model, tensor_parallel_size=2) as running:
        running.wait_for("ready")
        ranks = running.ranks()

        psutil.Process(running.child.pid).send_signal(signal.SIGKILL)

        _, alive = psutil.wait_procs(ranks, GONE_S)
        assert not alive


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "starting"])
def test_sigterm_ends_every_process_and_says_that_it_was_asked_to(tmp_path: Path, model: Path, ready: bool) -> None:
    with worker(tmp_path, model, tensor_parallel_size=2) as running:
        if ready:
            running.wait_for("ready")
        ranks = running.ranks()

        psutil.Process(running.child.pid).terminate()

        assert running.wait_for("exited").members["code"] == ExitCode.STOPPED
        _, alive = psutil.wait_procs(ranks, GONE_S)
        assert not alive


def test_a_running_request_is_finished_before_the_worker_ends(tmp_path: Path, model: Path) -> None:
    with worker(tmp_path, model) as running:
        running.wait_for("ready")
        with OpenEngine(running.grpc) as client:
            answer = client.generate(generate_request([1, 2, 3], 400))
            next(answer)

            psutil.Process(running.child.pid).terminate()

            assert list(answer)[-1].WhichOneof("event") == "finished"
        assert running.wait_for("exited").members["code"] == ExitCode.STOPPED


def test_a_model_that_cannot_be_served_is_not_tried_again(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "bert"}')
    with worker(tmp_path, broken) as running:
        assert running.wait_for("exited").members["code"] == ExitCode.CONFIGURATION


def test_a_taken_address_is_told_and_ends_the_start(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(AssertionError, match=f"cannot listen on {address}"),
            worker(tmp_path, model, listen={"grpc": address, "admin": "127.0.0.1:0"}),
        ):
            pass


def test_keys_that_cannot_be_read_end_the_start_with_a_sentence(tmp_path: Path, model: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"keys_file is .* cannot be read"),
        worker(tmp_path, model, keys_file=str(tmp_path / "none.json")) as running,
    ):
        running.wait_for("ready")
