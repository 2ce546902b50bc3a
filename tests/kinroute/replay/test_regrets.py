from __future__ import annotations

import numpy as np
import pytest

from kinroute.replay.regrets import regretted
from tests.kinroute.replay.loads import load
from tests.kinroute.replay.test_simulation import run


def test_lru_regrets_nothing_and_who_finds_nothing_regrets_all_that_lru_hits() -> None:
    requests = load(1, 120)
    lru = run(requests, capacity=60, warmup=0.0)

    nothing = regretted(requests, np.zeros(120, np.int64), 60, role="aggregated")
    everything = regretted(requests, np.full(120, 1000), 60, role="aggregated")

    assert nothing.sum() == pytest.approx(lru.hit_blocks, rel=0.02)
    assert everything.sum() == 0
