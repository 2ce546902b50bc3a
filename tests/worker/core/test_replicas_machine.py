"""Two to four ranks with the same inputs, other clocks, other copies and other hash seeds decide alike."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.worker.core.games import KINDS, Play
from tests.worker.core.replica_group import ReplicaGroup

SEEDS = st.integers(0, 1 << 16)
SHRINKS_FOR_S = 600
"""Time to find the smallest story of a failure, which takes minutes; without one it takes seconds."""
PRINTS_DIGESTS = """
import sys
from tests.worker.core.test_replicas_machine import played_digests
sys.stdout.write(played_digests())
"""


class Replicas(RuleBasedStateMachine):
    """Each step throws its own dice, so that steps can be left out of a story without changing the others."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.group = ReplicaGroup(random.Random(seed).randrange)

    @rule(name=st.sampled_from(KINDS["replicas"].names), seed=SEEDS)
    def do(self, name: str, seed: int) -> None:
        getattr(self.group, name)(random.Random(seed).randrange)

    @invariant()
    def every_rank_keeps_its_promises(self) -> None:
        self.group.compare()

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.group.settle(lambda sides: sides - 1)


TestReplicas = pytest.mark.timeout(SHRINKS_FOR_S)(Replicas.TestCase)
TestReplicas.settings = settings(max_examples=50, stateful_step_count=200, deadline=None)


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
