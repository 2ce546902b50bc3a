"""The admin listener: probes for supervisors, numbers for graphs, control calls for operators."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request
from tests.worker.running import Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    with worker(folder, make_tiny_model(folder / "model"), tensor_parallel_size=2) as started:
        started.wait_for("ready")
        yield started


def call(running: Running, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{running.admin}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30.0) as response:  # noqa: S310 - http, ours
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("path", ["/live", "/health", "/ready"])
def test_probes_are_a_word(running: Running, path: str) -> None:
    status, body = call(running, path)

    assert status == 200
    assert body in {"live", "ready"}


def test_a_worker_that_loads_is_live_and_not_ready(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("loading")
    with worker(folder, make_tiny_model(folder / "model")) as loading:
        early = call(loading, "/live")[0], call(loading, "/ready")[0]
        loading.wait_for("ready")

        assert early == (200, 503)
        assert call(loading, "/ready")[0] == 200


def test_metrics_count_requests_and_tokens(running: Running) -> None:
    with OpenEngine(running.grpc) as client:
        client.answer(generate_request([1, 2, 3], 3))

    body = call(running, "/metrics")[1]

    assert 'kinroute_worker_requests_total{phase="aggregated"}' in body
    assert "kinroute_worker_output_tokens_total" in body


def test_a_cleared_cache_hits_nothing(running: Running) -> None:
    prompt = list(range(50, 70))
    with OpenEngine(running.grpc) as client:
        client.answer(generate_request(prompt, 1))
        hit = client.answer(generate_request(prompt, 1))[-1].usage.cached_prompt_tokens

        assert call(running, "/kinroute/v1/cache/clear", "POST")[0] == 200
        missed = client.answer(generate_request(prompt, 1))[-1].usage.cached_prompt_tokens

    assert (hit, missed) == (16, 0)


def test_the_state_names_the_worker(running: Running) -> None:
    state = running.get("/kinroute/v1/state")

    assert (state["state"], state["role"], state["tensor_parallel_size"]) == ("ready", "aggregated", 2)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/ready", 405), ("GET", "/kinroute/v1/cache/clear", 405)],
)
def test_what_is_not_there_says_so(running: Running, method: str, path: str, status: int) -> None:
    assert call(running, path, method)[0] == status
