"""The simulation beside a real worker of two ranks: one trace, request after request, and the same decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginelink.block_keys import BlockScope, block_keys, scope_key
from kinroute.replay.arm import Arm
from kinroute.replay.hints import Hints
from kinroute.replay.loop import Speaker
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.simulated import GREEDY, Planned, cache_config, scheduler_config
from kinroute.replay.simulation import OpenLoop
from kinroute.replay.traces import tokens_of
from tests.kinroute.replay.loads import BLOCK, load
from tests.tiny_models import make_tiny_model
from tests.worker.clients import Edge, until
from tests.worker.running import Running, worker
from tests.worker.signed import answered, write_keys
from worker.core import checkpoint
from worker.core.events import KEY_BYTES, Removed, Updated
from worker.core.plan import Admit, Copied, Learned, Plan
from worker.core.recording import read
from worker.core.replica import Replica
from worker.core.scheduler import Scheduler
from worker.core.types import Phase, Request, RequestKey, Sampled, Stopping
from worker.recording_ring import latest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

REQUESTS = 300
DEVICE_BLOCKS, HOST_BLOCKS = 70, 40
ANSWER_TOKENS = 6
RANKS = 2
PAGE_BYTES = 2 * 2 * 16 * 4 * BLOCK * RANKS
"""Of all ranks: layers, keys and values, head size, float32, tokens; each rank has one of the two KV heads."""
FIRST_TOKEN, TOKENS = 3, 250
APART_S = 10.0


def ids_of(blocks: Iterable[tuple[int, int]]) -> list[int]:
    return [first + at for first, count in blocks for at in range(count)]


def one_at_a_time() -> list[PlayedRequest]:
    """Each is over, and its copies are, long before the next."""
    made: list[PlayedRequest] = []
    for index, one in enumerate(load(11, REQUESTS)):
        output = max(1, min(one.output_tokens, ANSWER_TOKENS))
        ids = ids_of(one.answer_blocks)[: -(-output // BLOCK)]
        answer = tuple((block, 1) for block in ids)
        if len(ids) * BLOCK < output:
            output = max(1, len(ids) * BLOCK)
        made.append(replace(one, t_s=APART_S * index, duration_s=1.0, output_tokens=output, answer_blocks=answer))
    return made


@dataclass
class Decided:
    """`hits`: blocks that each request found. `left`: (block, tier) as blocks left that tier. `lowered`: first block,
    last block, how many, and the priority, as priorities changed."""

    hits: list[int] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)
    lowered: list[tuple[int, int, int, int]] = field(default_factory=list)


def decided(
    plans: Iterable[Plan], replica: Replica, requests: Sequence[PlayedRequest], words: dict[int, list[int]]
) -> Decided:
    """What these plans did to blocks, which stand by the ids of the load; `words`: each block's tokens."""
    found = Decided()
    names: dict[bytes, int] = {}
    left = iter(requests)
    for plan in plans:
        replica.begin(plan.number, plan.time_ms)
        for act in plan.acts:
            if isinstance(act, Admit):
                request = next(left)
                found.hits.append(act.matched // BLOCK)
                ids = [*ids_of(request.prompt_blocks), *ids_of(request.answer_blocks)]
                tokens = b"".join(token.to_bytes(4, "little") for block in ids for token in words[block])
                keys = block_keys(scope_key(BlockScope(act.scope)), tokens, BLOCK)
                names.update(zip(map(bytes, keys), ids, strict=True))
            replica.act(act)
        for event in replica.finish().events:
            if isinstance(event, Removed):
                # A path is told from its root on; it leaves from its end.
                for at in reversed(range(0, len(event.keys), KEY_BYTES)):
                    found.left.append((names[event.keys[at : at + KEY_BYTES]], int(event.tier)))
            elif isinstance(event, Updated):
                found.lowered.append((names[event.first], names[event.last], event.count, event.new_priority))
    return found


class TokenByToken(OpenLoop):
    """Keeps the plans. Tokens of an answer come one a step, as they do where a model makes them, and not in one go."""

    plans: list[Plan]

    def step_ms(self, planned: Planned, now_ms: float) -> float:
        self.plans = [*getattr(self, "plans", ()), planned.plan]
        return super().step_ms(planned, now_ms)

    def speak(self, keys: Sequence[RequestKey], now_ms: float) -> Iterable[tuple[Speaker, int]]:
        return [(self.speakers[key], 1) for key in keys]


def simulated(requests: list[PlayedRequest], arm: Arm) -> Decided:
    loop = TokenByToken(requests, arm, lambda ended: None)
    loop.run()
    replica = Replica(replace(cache_config(arm, BLOCK), tells_events=True))
    blocks = {block for one in requests for block in (*ids_of(one.prompt_blocks), *ids_of(one.answer_blocks))}
    return decided(loop.plans, replica, requests, {block: tokens_of([(block, 1)], BLOCK).tolist() for block in blocks})


def planned_again(
    recorded: Iterable[Plan], arm: Arm, requests: Sequence[PlayedRequest], words: dict[int, list[int]]
) -> Iterator[tuple[Plan, Plan]]:
    """Each plan, and what the replay's worker plans where the same comes at the same time: prompts, tokens, copies."""
    scheduler = Scheduler(scheduler_config(arm, len(requests)), Replica(cache_config(arm, BLOCK)), lambda request: b"")
    left = iter(requests)
    answers: dict[RequestKey, list[int]] = {}
    for plan in recorded:
        for act in plan.acts:
            match act:
                case Copied():
                    scheduler.copied(act.number, act.good)
                case Admit():
                    request, key = next(left), RequestKey(act.key)
                    answer = [token for block in ids_of(request.answer_blocks) for token in words[block]]
                    # Where the load has none, the only token is the last, which is not computed.
                    answers[key] = answer[: request.output_tokens] or [FIRST_TOKEN]
                    scheduler.submit(
                        Request(
                            key=key,
                            phase=Phase.AGGREGATED,
                            token_ids=np.array(prompt_of(request, words), np.int32),
                            sampling=GREEDY,
                            stopping=Stopping(request.output_tokens),
                            salt=act.scope,
                            conversation=act.conversation,
                            parent=act.parent,
                            turn=act.turn,
                            prompt_hash=act.prompt_hash,
                        )
                    )
        made = scheduler.plan(plan.time_ms)
        assert made is not None, f"nothing to do in plan {plan.number}"
        yield plan, made[0]
        batch = made[1].batch
        keys = batch.sample_requests if batch is not None else ()
        scheduler.complete(made[0], Sampled(keys, tuple(answers[key].pop(0) for key in keys)))


def spelled(block: int) -> list[int]:
    """Tokens of the tiny model's that no other block has."""
    return [FIRST_TOKEN + block // TOKENS**at % TOKENS for at in range(BLOCK)]


def prompt_of(request: PlayedRequest, words: dict[int, list[int]]) -> list[int]:
    return [token for block in ids_of(request.prompt_blocks) for token in words[block]]


def ask_all(running: Running, edge: Edge, requests: Sequence[PlayedRequest]) -> dict[int, list[int]]:
    """Every request after the one before it and its copies; the tokens of each block: of answers those that came."""
    words: dict[int, list[int]] = {}
    for request in requests:
        for block in ids_of(request.prompt_blocks):
            words.setdefault(block, spelled(block))
        tokens, _ = answered(
            edge, request.conversation, prompt_of(request, words), request.parent or "",
            family=f"family {request.play}", tokens=request.output_tokens,
        )  # fmt: skip
        assert len(tokens) == request.output_tokens
        for at, block in enumerate(ids_of(request.answer_blocks)):
            said = tokens[BLOCK * at : BLOCK * (at + 1)]
            words[block] = [*said, *spelled(block)[len(said) :]]
        until(lambda: is_at_rest(running))
    return words


def is_at_rest(running: Running) -> bool:
    """Nothing is held, and no copy between tiers is under way."""
    return running.leaks()["clean"] and not running.metric("kinroute_worker_kv_pages", state="moving")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def real_run(
    folder: Path, model: Path, requests: Sequence[PlayedRequest], cache: dict[str, Any]
) -> tuple[list[Plan], Replica, dict[int, list[int]]]:
    """What a worker of two ranks planned for these requests, its cache before, and the tokens of each block."""
    keys = write_keys(folder / "keys.json")
    (folder / "recording").mkdir()
    given = {
        "tokens_per_block": BLOCK,
        "max_tokens": DEVICE_BLOCKS * BLOCK,
        "host_cache_size": HOST_BLOCKS * PAGE_BYTES,
        "enable_partial_reuse": False,
        "recording_dir": str(folder / "recording"),
    }
    with worker(
        folder / "files", model, tensor_parallel_size=RANKS, kv_cache_config=given | cache, keys_file=str(keys)
    ) as real:
        real.wait_for("ready")
        with Edge(real.grpc) as edge:
            words = ask_all(real, edge, requests)
        assert real.metric("kinroute_worker_kv_tier_pages", tier="host") == HOST_BLOCKS
        assert real.metric("kinroute_worker_digest_mismatches_total") == 0
    segments = [read(file.read_bytes()) for file in latest(folder / "recording")[::-1]]
    config = replace(segments[0].header.config, tells_events=True)
    plans = [step.plan for segment in segments for step in segment.steps()]
    return plans, checkpoint.load(config, bytes(segments[0].checkpoint)), words


def arm_of(policy: str) -> Arm:
    hints = Hints(parent=True, stop=False, final=False)
    return Arm(policy, DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, hints=hints, tp=RANKS, warmup=0.0)


@pytest.mark.parametrize("policy", ["lru", "subagent"])
def test_a_real_worker_finds_drops_and_demotes_what_the_simulation_does(
    tmp_path: Path, model: Path, policy: str
) -> None:
    requests = one_at_a_time()
    reuse: dict[str, Any] = {"policy": "per_conversation"}
    if policy == "subagent":
        # In the simulation there is time between requests, so children are always idle for long enough.
        reuse |= {"finished_subagent_priority": 0, "finished_subagent_min_idle_iterations": 1}

    plans, replica, words = real_run(
        tmp_path, model, requests, {"block_reuse_config": reuse, "retention_policy": policy}
    )
    did = decided(plans, replica, requests, words)
    would = simulated(requests, arm_of(policy))

    assert sum(would.hits) > 500
    assert did.hits == would.hits
    assert len(would.left) > 500
    assert did.left == would.left
    assert bool(would.lowered) is (policy == "subagent")
    assert did.lowered == would.lowered


def test_a_real_worker_plans_by_what_it_learned_as_the_simulation_does(tmp_path: Path, model: Path) -> None:
    """Ages count in plan time, so the simulation is told its clock."""
    requests = one_at_a_time()
    cache = {"block_reuse_config": {"policy": "per_conversation"}, "retention_policy": "return_index"}

    plans, replica, words = real_run(tmp_path, model, requests, cache)

    for plan, again in planned_again(plans, arm_of("return_index"), requests, words):
        assert again == plan
    assert sum(isinstance(act, Learned) for plan in plans for act in plan.acts) >= 4
    did = decided(plans, replica, requests, words)
    assert sum(did.hits) > 500
    assert did.left != simulated(requests, arm_of("lru")).left
