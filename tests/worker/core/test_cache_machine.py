"""Tree, tiers, retention, conversations and requests together, against one node per block and full scans."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.worker.core.cache_pair import CachePair
from tests.worker.core.games import KINDS

NAMES = KINDS["caches"].names
SEEDS = st.integers(0, 1 << 16)
SHRINKS_FOR_S = 600
"""Time to find the smallest story of a failure, which takes minutes; without one it takes seconds."""


class Caches(RuleBasedStateMachine):
    """Each step throws its own dice, so that steps can be left out of a story without changing the others."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.pair = CachePair(random.Random(seed).randrange)

    @rule(name=st.sampled_from(NAMES), seed=SEEDS)
    def do(self, name: str, seed: int) -> None:
        getattr(self.pair, name)(random.Random(seed).randrange)

    @invariant()
    def both_are_alike(self) -> None:
        self.pair.compare()


TestCaches = pytest.mark.timeout(SHRINKS_FOR_S)(Caches.TestCase)
TestCaches.settings = settings(max_examples=60, stateful_step_count=200, deadline=None)
