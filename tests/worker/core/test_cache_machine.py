"""Tree, tiers, retention, conversations and requests together, against one node per block and full scans."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.worker.core.cache_pair import RULES, CachePair, Dice

NAMES = [name for name, often in RULES.items() for _ in range(often)]

SHRINKS_FOR_S = 600
"""Time to find the smallest story of a failure, which takes minutes; without one it takes seconds."""


def dice_of(data: st.DataObject) -> Dice:
    return lambda sides: data.draw(st.integers(0, sides - 1))


class Caches(RuleBasedStateMachine):
    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.pair = CachePair(dice_of(data))

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def do(self, name: str, data: st.DataObject) -> None:
        getattr(self.pair, name)(dice_of(data))

    @invariant()
    def both_are_alike(self) -> None:
        self.pair.compare()


TestCaches = pytest.mark.timeout(SHRINKS_FOR_S)(Caches.TestCase)
TestCaches.settings = settings(max_examples=60, stateful_step_count=150, deadline=None)
