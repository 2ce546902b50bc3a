"""The admin listener: probes for supervisors, numbers for graphs, control calls for operators."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginelink.block_keys import BlockScope, block_keys, scope_key
from openengine.v1 import generation_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request
from tests.worker.running import Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("worker")
    cache = {"tokens_per_block": 4, "max_tokens": 4096, "block_reuse_config": {"policy": "per_conversation"}}
    with worker(folder, make_tiny_model(folder / "model"), tensor_parallel_size=2, kv_cache_config=cache) as started:
        started.wait_for("ready")
        yield started


def call(running: Running, path: str, method: str = "GET", body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{running.admin}{path}", data, method=method)
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


def cached_tokens(client: OpenEngine, prompt: list[int], salt: str = "", conversation: str = "") -> int:
    """How many of the prompt's tokens were cached; they are from now on."""
    request = generate_request(
        prompt,
        1,
        kv=generation_pb2.KvOptions(cache_salt=salt),
        extra={"conversation_id": conversation} if conversation else {},
    )
    return int(client.answer(request)[-1].usage.cached_prompt_tokens)


def test_clearing_a_tenant_spares_the_others(running: Running) -> None:
    prompt = list(range(70, 90))
    with OpenEngine(running.grpc) as client:
        for salt in ("one", "two", "one", "two"):
            before = cached_tokens(client, prompt, salt)
        status, _ = call(running, "/kinroute/v1/cache/clear", "POST", {"tenant": b"one".hex()})
        after = [cached_tokens(client, prompt, salt) for salt in ("one", "two")]

    assert (status, before, after) == (200, 16, [0, 16])


def test_clearing_a_family_spares_what_others_own(running: Running) -> None:
    own, other = list(range(90, 110)), list(range(110, 126)) + list(range(8))
    with OpenEngine(running.grpc) as client:
        cached_tokens(client, own, conversation="leaving")
        cached_tokens(client, other, conversation="staying")
        status, _ = call(running, "/kinroute/v1/cache/clear", "POST", {"family": "leaving"})
        after = [cached_tokens(client, prompt) for prompt in (own, other)]

    assert (status, after) == (200, [0, 20])


def test_a_block_tells_where_it_is_and_then_why_it_is_gone(running: Running) -> None:
    prompt = list(range(130, 150))
    scope = scope_key(BlockScope(b"a salt"))
    key = block_keys(scope, np.array(prompt, "<u4").tobytes(), 4)[2].hex()
    with OpenEngine(running.grpc) as client:
        assert running.get(f"/kinroute/v1/blocks/{key}") == {"state": "unknown"}
        cached_tokens(client, prompt, "a salt", "whose")
        there = running.get(f"/kinroute/v1/blocks/{key}")
        call(running, "/kinroute/v1/cache/clear", "POST", {"family": "whose"})
        # The next answer is of a later step than the clearing.
        cached_tokens(client, [1, 2, 3])
        gone = running.get(f"/kinroute/v1/blocks/{key}")

    assert (there["state"], there["tier"], there["owner"], there["position"]) == ("resident", "device", "whose", 2)
    assert (gone["state"], gone["reason"], gone["priority"]) == ("evicted", "cleared", 35)
    assert gone["plan"] > 0
    assert running.metric("kinroute_worker_kv_evicted_pages_total", reason="cleared") >= 5


def test_a_dry_run_and_the_families_are_answered_over_http(running: Running) -> None:
    with OpenEngine(running.grpc) as client:
        cached_tokens(client, list(range(150, 170)), conversation="shown")
    status, body = call(running, "/kinroute/v1/demotions/dry-run", "POST", {"parent": "shown"})
    [family] = running.get("/kinroute/v1/families?family=shown")["conversations"]

    assert (status, json.loads(body)["enabled"], json.loads(body)["children"]) == (200, False, [])
    assert (family["state"], family["blocks"]) == ("idle", {"device": 5, "host": 0, "disk": 0})
    assert family["priority"] == [35, 35]
    assert family["idle_steps"] >= 0


def test_a_wrong_call_is_refused_over_http(running: Running) -> None:
    status, body = call(running, "/kinroute/v1/cache/clear", "POST", {"tenent": "00"})

    assert (status, "unknown field `tenent`" in json.loads(body)["error"]) == (400, True)
    assert call(running, "/kinroute/v1/cache/clear", "POST", "x" * 70_000)[0] == 413


def test_the_state_and_the_metrics_show_the_pages_of_each_tier(running: Running) -> None:
    with OpenEngine(running.grpc) as client:
        client.answer(generate_request(list(range(20, 40)), 1))
    running.wait_clean()

    tiers = running.get("/kinroute/v1/state")["tiers"]
    body = call(running, "/metrics")[1]

    device = tiers["device"]
    assert device["total"] == 1024 == device["free"] + device["held"] + device["cached"] + device["moving"]
    assert device["cached"] > 0
    assert tiers["host"]["total"] == tiers["disk"]["total"] == 0
    assert f'kinroute_worker_kv_pages{{state="cached",tier="device"}} {device["cached"]:.1f}' in body


def test_metrics_tell_cached_from_computed_tokens(running: Running) -> None:
    def counted() -> tuple[float, float]:
        numbers = dict(line.rsplit(" ", 1) for line in call(running, "/metrics")[1].splitlines() if line[0] != "#")
        matched = numbers['kinroute_worker_kv_matched_tokens_total{tier="device"}']
        return float(matched), float(numbers["kinroute_worker_kv_uncached_tokens_total"])

    prompt = list(range(40, 62))
    with OpenEngine(running.grpc) as client:
        client.answer(generate_request(prompt, 1))
        before = counted()
        client.answer(generate_request(prompt, 1))
        after = counted()

    assert (after[0] - before[0], after[1] - before[1]) == (20, 2)


def test_the_state_names_the_worker(running: Running) -> None:
    state = running.get("/kinroute/v1/state")

    assert (state["state"], state["role"], state["tensor_parallel_size"]) == ("ready", "aggregated", 2)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/ready", 405), ("GET", "/kinroute/v1/cache/clear", 405)],
)
def test_what_is_not_there_says_so(running: Running, method: str, path: str, status: int) -> None:
    assert call(running, path, method)[0] == status
