"""A worker's processes: they start together, end together, and come back when one is lost."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request
from tests.worker.running import Running, worker
from worker.core.recording import read
from worker.exits import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
GONE_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def starts(running: Running) -> int:
    """How often its ranks were started, the last time included."""
    return 1 + sum(news.event == "restarting" for news in running.heard)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Running]:
    """Two ranks. Who ends them waits until the next ones are ready."""
    patience = {"report_timeout_s": 1.0, "step_timeout_s": 2.0}
    with worker(tmp_path_factory.mktemp("group"), model, tensor_parallel_size=2, group=patience) as running:
        running.wait_for("ready")
        yield running


def test_a_lost_rank_ends_the_group_and_the_next_one_answers_alike(group: Running) -> None:
    before, old, count = group.engine.answer([1, 2, 3], 6), group.ranks(), starts(group)

    old[1].kill()

    assert "rank 1" in group.wait_for("restarting", count).members["why"]
    group.wait_for("ready", count + 1)
    psutil.wait_procs(old, GONE_S)
    assert not any(process.is_running() for process in old)
    assert group.engine.answer([1, 2, 3], 6) == before


def test_a_stuck_rank_ends_the_group(group: Running) -> None:
    count = starts(group)

    group.ranks()[1].suspend()
    with OpenEngine(group.grpc) as client:
        last = client.answer(generate_request([1, 2, 3]))[-1]

    assert last.error.retryable
    assert re.search("rank 1 has not reported|in one step for more than", last.error.message)
    recording = group.wait_for("restarting", count).members["recording"]
    failure = read(Path(recording).read_bytes()).failure
    assert failure is not None
    assert failure.why == last.error.message
    group.wait_for("ready", count + 1)


def test_no_rank_outlives_a_launcher_that_is_killed(group: Running) -> None:
    """Last: this worker does not come back."""
    ranks = group.ranks()
    assert len(ranks) == 2

    psutil.Process(group.child.pid).send_signal(signal.SIGKILL)

    _, alive = psutil.wait_procs(ranks, GONE_S)
    assert not alive


def test_sigterm_while_ranks_start_ends_every_process_and_says_that_it_was_asked_to(
    tmp_path: Path, model: Path
) -> None:
    with worker(tmp_path, model, tensor_parallel_size=2) as running:
        ranks = running.ranks()

        psutil.Process(running.child.pid).terminate()

        assert running.wait_for("exited").members["code"] == ExitCode.STOPPED
        _, alive = psutil.wait_procs(ranks, GONE_S)
        assert not alive


def test_sigterm_lets_a_running_request_finish_and_then_ends_every_process(tmp_path: Path, model: Path) -> None:
    with worker(tmp_path, model, tensor_parallel_size=2) as running:
        running.wait_for("ready")
        ranks = running.ranks()
        with OpenEngine(running.grpc) as client:
            answer = client.generate(generate_request([1, 2, 3], 400))
            next(answer)

            psutil.Process(running.child.pid).terminate()

            assert list(answer)[-1].WhichOneof("event") == "finished"
        assert running.wait_for("exited").members["code"] == ExitCode.STOPPED
        _, alive = psutil.wait_procs(ranks, GONE_S)
        assert not alive


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
