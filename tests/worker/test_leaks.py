"""Whatever happens to requests, nothing of them stays: no page, no pin, no pull, no task, on any rank."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from openengine.v1 import generation_pb2, service_pb2_grpc
from tests.tiny_models import make_tiny_model
from tests.worker.clients import generate_request
from tests.worker.running import Running, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
REQUESTS, AT_ONCE = 200, 32
SHARED = list(range(100, 140))


async def play(stub: Any, request: generation_pb2.GenerateRequest, patience_s: float | None) -> str:
    """Read the answer until its end, or for `patience_s` and then hang up; returns the last event's kind."""
    call = stub.Generate(request)
    last = ""
    try:
        async with asyncio.timeout(patience_s):
            async for response in call:
                last = response.WhichOneof("event")
                if last == "prefill_ready":
                    request.kv.session.CopyFrom(response.prefill_ready.kv_session)
    except TimeoutError:
        call.cancel()
        return "hung up"
    return last


async def handed_over(context: Any, generation: Any, chance: random.Random) -> str:
    """A context leg, then its generation leg; one in three hangs up somewhere."""
    prompt = SHARED[: chance.randrange(40)] + [chance.randrange(250) for _ in range(chance.randrange(1, 60))]
    tokens = chance.randrange(1, 24)
    leg = generate_request(prompt, tokens, extra={"request_type": "context_only"})
    patience_s = chance.random() * 0.3 if chance.random() < 0.33 else None
    ended = await play(context, leg, patience_s)
    if ended != "prefill_ready":
        return ended
    second = generate_request(prompt, tokens, kv=generation_pb2.KvOptions(session=leg.kv.session))
    return await play(generation, second, patience_s)


async def play_all(context: Running, generation: Running) -> list[str]:
    places = asyncio.Semaphore(AT_ONCE)
    async with grpc.aio.insecure_channel(context.grpc) as one, grpc.aio.insecure_channel(generation.grpc) as two:
        stubs = service_pb2_grpc.InferenceStub(one), service_pb2_grpc.InferenceStub(two)

        async def one_of_many(seed: int) -> str:
            async with places:
                return await handed_over(*stubs, random.Random(seed))

        return await asyncio.gather(*(one_of_many(seed) for seed in range(REQUESTS)))


def test_nothing_stays_of_many_requests_of_which_some_hang_up(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    small = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 2048}, "kv_transfer": {"handoff_timeout_s": 3.0}}
    with (
        worker(tmp_path, model, "context", role="context", tensor_parallel_size=2, **small) as context,
        worker(tmp_path, model, "generation", role="generation", **small) as generation,
    ):
        for running in (context, generation):
            running.wait_for("ready")
        tasks = [running.leaks()["tasks"] for running in (context, generation)]

        endings = asyncio.run(play_all(context, generation))

        for running, before in zip((context, generation), tasks, strict=True):
            running.wait_clean()
            assert running.leaks()["tasks"] <= before
    assert {"finished", "hung up"} <= set(endings)
    assert endings.count("finished") > REQUESTS // 2, endings
