"""Real workers whose prompts do not fit on the device: what was moved to host and disk comes back as it was."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from openengine.v1 import generation_pb2
from tests.tiny_models import make_tiny_model
from tests.worker.clients import OpenEngine, generate_request, token_ids
from tests.worker.running import Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BLOCK = 4
PROMPT = 26 * BLOCK + 2
CONVERSATIONS = 12
TOKENS = 6
DEVICE_PAGES = 64
HOST_PAGES, DISK_PAGES = 80, 600
HEAD_BYTES = 2 * 2 * 16 * 4 * BLOCK
"""Of one KV head's part of a page: layers, keys and values, head size, float32, tokens."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads: of two ranks, one has larger pages than the other."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=3)


@pytest.fixture(scope="module", params=[1, 2])
def running(tmp_path_factory: pytest.TempPathFactory, model: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    ranks = int(request.param)
    folder = tmp_path_factory.mktemp("tiers")
    (folder / "disk").mkdir()
    share = -(-3 // ranks) * HEAD_BYTES * ranks
    cache = {
        "tokens_per_block": BLOCK,
        "max_tokens": DEVICE_PAGES * BLOCK,
        "host_cache_size": HOST_PAGES * share,
        "disk_cache_size": DISK_PAGES * share,
        "disk_cache_path": str(folder / "disk"),
    }
    with worker(folder, model, tensor_parallel_size=ranks, kv_cache_config=cache) as running:
        running.wait_for("ready")
        yield running


def prompts(seed: int) -> list[list[int]]:
    """With a common beginning, as relatives have it."""
    chosen = random.Random(seed)
    common = [chosen.randrange(3, 250) for _ in range(3 * BLOCK)]
    return [common + [chosen.randrange(3, 250) for _ in range(PROMPT - len(common))] for _ in range(CONVERSATIONS)]


def ask(running: Running, prompt: list[int], *, bypass: bool = False) -> Answer:
    options = generation_pb2.KvOptions(bypass_prefix_cache=bypass)
    with OpenEngine(running.grpc) as engine:
        responses = engine.answer(generate_request(prompt, TOKENS, kv=options))
    return Answer(token_ids(responses), responses[-1].usage.cached_prompt_tokens)


def test_answers_after_a_trip_through_host_and_disk_are_the_same_token_for_token(running: Running) -> None:
    asked = prompts(1)
    expected = [ask(running, prompt, bypass=True).tokens for prompt in asked]
    for prompt in asked:
        ask(running, prompt)

    again = [ask(running, prompt) for prompt in reversed(asked)]

    assert [answer.tokens for answer in again] == expected[::-1]
    assert [answer.cached for answer in again] == [PROMPT // BLOCK * BLOCK] * CONVERSATIONS
    for source in ("host", "disk"):
        assert running.metric("kinroute_worker_kv_onboard_bytes_total", source=source, target="device") > 0
    running.wait_clean()


def test_requests_that_run_beside_each_other_get_the_same_answers_too(running: Running) -> None:
    asked = prompts(2)
    expected = [ask(running, prompt, bypass=True).tokens for prompt in asked]
    order = [index for _ in range(4) for index in range(CONVERSATIONS)]
    random.Random(3).shuffle(order)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda index: ask(running, asked[index]), order))

    assert [answer.tokens for answer in answers] == [expected[index] for index in order]
    running.wait_clean()


def disk_file(rank: psutil.Process) -> Path:
    """The open file of its disk tier. Descriptors come and go meanwhile."""
    for fd in os.listdir(f"/proc/{rank.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            file = Path(f"/proc/{rank.pid}/fd/{fd}")
            if ".kinroute-pages-" in os.readlink(file):
                return file
    raise AssertionError(f"process {rank.pid} has no disk tier open")


def test_the_disk_file_belongs_to_its_rank_alone_and_has_no_name(running: Running) -> None:
    for rank in running.ranks():
        tier = disk_file(rank)

        assert tier.stat().st_mode & 0o777 == 0o600
        assert tier.stat().st_nlink == 0


def test_a_page_that_one_rank_reads_wrong_is_computed_again_and_the_answer_is_right(running: Running) -> None:
    """Its other ranks read it well. After three such failures nobody uses the disk any more."""
    asked = prompts(4)
    expected = [ask(running, prompt, bypass=True).tokens for prompt in asked]
    for prompt in asked:
        ask(running, prompt)
    with disk_file(running.ranks()[-1]).open("r+b") as disk:
        disk.write(b"\xa5" * os.fstat(disk.fileno()).st_size)

    answers = [ask(running, prompt) for _ in range(2) for prompt in asked]

    assert [answer.tokens for answer in answers] == expected * 2
    assert min(answer.cached for answer in answers) < PROMPT // BLOCK * BLOCK
    assert running.metric("kinroute_worker_kv_rank_copy_failures_total", tier="disk") >= 3
    assert running.metric("kinroute_worker_kv_tier_off", tier="disk") == 1
    running.wait_clean()
