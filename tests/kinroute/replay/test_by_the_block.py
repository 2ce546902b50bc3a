"""Every policy, in the simulation that runs workers' code, beside a cache of single blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginelink.block_keys import BlockScope, block_keys, scope_key
from kinroute.replay.arm import Arm
from kinroute.replay.hints import Hints
from kinroute.replay.plays import PlayedRequest
from kinroute.replay.segments import Role
from kinroute.replay.simulated import Planned, cache_config
from kinroute.replay.simulation import OpenLoop
from kinroute.replay.traces import tokens_of
from tests.kinroute.replay.loads import BLOCK, load
from tests.kinroute.replay.plain_cache import PlainCache, Policy, Said, ids_of
from worker.core.events import KEY_BYTES, Removed, Updated
from worker.core.plan import Admit, Plan
from worker.core.replica import Replica


class Kept(OpenLoop):
    """Keeps the plans."""

    plans: list[Plan]

    def step_ms(self, planned: Planned, now_ms: float) -> float:
        self.plans = [*getattr(self, "plans", ()), planned.plan]
        return super().step_ms(planned, now_ms)


def decided(plans: Sequence[Plan], arm: Arm, requests: Sequence[PlayedRequest]) -> Said:
    """What a replica does in these plans, by the block."""
    replica = Replica(replace(cache_config(arm, BLOCK), tells_events=True))
    said = Said()
    names: dict[bytes, int] = {}
    above: dict[int, int] = {}
    for plan in plans:
        replica.begin(plan.number, plan.time_ms)
        for act in plan.acts:
            if isinstance(act, Admit):
                request = requests[act.key - 1]
                ids = [*ids_of(request.prompt_blocks), *ids_of(request.answer_blocks)]
                tokens = tokens_of([(one, 1) for one in ids], BLOCK).tobytes()
                keys = block_keys(scope_key(BlockScope(act.scope)), tokens, BLOCK)
                names.update(zip(map(bytes, keys), ids, strict=True))
                above.update(zip(ids[1:], ids, strict=False))
                if not act.resumed:
                    said.hits[act.key - 1] = act.matched // BLOCK
            assert replica.act(act)
        for event in replica.finish().events:
            if isinstance(event, Removed):
                # A path is told from its root on; it leaves from its end.
                for at in reversed(range(0, len(event.keys), KEY_BYTES)):
                    said.left.append(names[event.keys[at : at + KEY_BYTES]])
            elif isinstance(event, Updated):
                block = names[event.last]
                for turn in range(event.count):
                    block = above[block] if turn else block
                    said.changed.setdefault(plan.number, {})[block] = event.new_priority
    return said


@pytest.mark.parametrize("policy", ["lru", "subagent", "return_index"])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    capacity=st.integers(50, 110),
    role=st.sampled_from(["aggregated", "context"]),
    stop=st.booleans(),
    parent=st.booleans(),
)
def test_hits_and_what_leaves_and_what_is_demoted_are_those_of_a_cache_of_single_blocks(
    policy: Policy, seed: int, capacity: int, role: Role, stop: bool, parent: bool
) -> None:
    requests = load(seed, 90)
    arm = Arm(policy, capacity, role=role, hints=Hints(parent=parent, stop=stop, final=stop), warmup=0.0)
    loop = Kept(requests, arm, lambda ended: None)
    loop.run()
    plain = PlainCache(requests, capacity, policy)
    for plan in loop.plans:
        plain.follow(plan)

    assert plain.said == decided(loop.plans, arm, requests)
