"""A rank that torchrun would start, whose manager takes other pages than it should from one plan on.

`python -m tests.worker.corrupted_rank CONFIG PLAN`; everything else is as in `kinroute worker --config CONFIG`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from worker.app import run_worker
from worker.core.replica import Replica
from worker.core.tiers import Tier
from worker.settings import load_settings


def corrupt(plan: int) -> None:
    """Every manager of this process goes wrong as it begins `plan`: its next two free pages change places."""
    begin = Replica.begin

    def begin_wrongly(self: Replica, number: int, now_ms: int = 0) -> None:
        begin(self, number, now_ms)
        if number == plan:
            free = self.cache.pools.free[Tier.DEVICE]
            free.give(free.take(2)[::-1])

    Replica.begin = begin_wrongly  # type: ignore[method-assign]


if __name__ == "__main__":
    corrupt(int(sys.argv[2]))
    sys.exit(run_worker(load_settings(Path(sys.argv[1]))))
