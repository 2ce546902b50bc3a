"""A rank whose clocks are an hour ahead and whose copies between tiers are late, most by milliseconds, twenty by more.

`python -m tests.worker.late_rank CONFIG SEED`; everything else is as in `kinroute worker --config CONFIG`.
"""

from __future__ import annotations

import time

AHEAD_S = 3600
LONG_DELAYS = 20
EVERY = 12
"""One copy in so many is late by seconds, until there were enough of them."""


def _set_clocks() -> None:
    monotonic, monotonic_ns, now, now_ns = time.monotonic, time.monotonic_ns, time.time, time.time_ns
    time.monotonic = lambda: monotonic() + AHEAD_S
    time.monotonic_ns = lambda: monotonic_ns() + AHEAD_S * 10**9
    time.time = lambda: now() + AHEAD_S
    time.time_ns = lambda: now_ns() + AHEAD_S * 10**9


# Before anything else has taken a clock for itself.
if __name__ == "__main__":
    _set_clocks()

import random  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from worker import assembly  # noqa: E402
from worker.app import run_worker  # noqa: E402
from worker.memory.mover import Mover  # noqa: E402
from worker.settings import load_settings  # noqa: E402


class LateMover(Mover):
    dice = random.Random()
    num_copies = 0
    num_long = 0

    def _begin(self, copy: Any) -> None:
        self.num_copies += 1
        if self.num_copies % EVERY == 0 and self.num_long < LONG_DELAYS:
            self.num_long += 1
            sys.stderr.write(f"long delay {self.num_long}\n")
            time.sleep(self.dice.uniform(1.0, 3.0))
        else:
            time.sleep(self.dice.expovariate(1 / 0.003))
        super()._begin(copy)


if __name__ == "__main__":
    LateMover.dice.seed(int(sys.argv[2]))
    assembly.Mover = LateMover  # type: ignore[attr-defined]
    sys.exit(run_worker(load_settings(Path(sys.argv[1]))))
