"""Two to four ranks with the same inputs, other clocks, other copies and other hash seeds decide alike."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.worker.core.games import KINDS, Play
from tests.worker.core.replica_group import ReplicaGroup

SHRINKS_FOR_S = 600
"""Time to find the smallest story of a failure, which takes minutes; without one it takes seconds."""
PRINTS_DIGESTS = """
import sys
from tests.worker.core.test_replicas_machine import played_digests
sys.stdout.write(played_digests())
"""


class Replicas(RuleBasedStateMachine):
    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.throw = data
        self.group = ReplicaGroup(self.dice)

    def dice(self, sides: int) -> int:
        return self.throw.draw(st.integers(0, sides - 1))

    @rule(name=st.sampled_from(KINDS["replicas"].names), data=st.data())
    def do(self, name: str, data: st.DataObject) -> None:
        self.throw = data
        getattr(self.group, name)(self.dice)

    @invariant()
    def every_rank_keeps_its_promises(self) -> None:
        self.group.compare()

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.group.settle(lambda sides: sides - 1)


TestReplicas = pytest.mark.timeout(SHRINKS_FOR_S)(Replicas.TestCase)
TestReplicas.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def played_digests() -> str:
    """Rank 0's, of a few games in which memory was short and families came and went."""
    acts: set[str] = set()
    digests: list[str] = []
    for seed in range(6):
        group = Play("replicas", f"game {seed}").run(600)
        assert isinstance(group, ReplicaGroup)
        acts |= {decision.act for decision in group.leader.replica.decisions}
        digests.append(group.leader.replica.digest.hex())
    assert {"demoted", "restored", "move", "loaded", "evict capacity", "copied"} <= acts, "easy games"
    return " ".join(digests)


def test_a_group_under_another_hash_seed_comes_to_the_same_digest() -> None:
    digests = played_digests()

    for seed in ("1", "2"):
        ended = subprocess.run(
            [sys.executable, "-c", PRINTS_DIGESTS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        assert ended.stdout.decode() == digests
