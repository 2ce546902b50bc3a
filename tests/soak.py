"""`make soak`: the games of the cache manager, one after the other, for as many STEPS as asked, thrown by SEED.

Every game is a fresh system in another configuration. A failure names its game; `GAME="caches 1 17"` plays that one
alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from types import FrameType

from tests.worker.core.games import KINDS, Play

TRIES = 500
"""Of each game; about three in four do something, which counts as a step."""
REPORT_EVERY_S = 10.0
HANGS_AFTER_S = 120
"""A game takes less than a second."""


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def hangs(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no end after {HANGS_AFTER_S} s")


def play(kind: str, seed: str) -> tuple[int, bool]:
    """How many steps it took, and whether all went well."""
    game = Play(kind, seed)
    signal.alarm(HANGS_AFTER_S)
    try:
        game.run(TRIES)
    except Exception:  # noqa: BLE001 - the outermost loop: whatever it is, it is told with its seed
        tell(f'failed in step {game.steps}, {game.last}; again: make soak GAME="{kind} {seed}"')
        tell(traceback.format_exc())
        return game.steps, False
    return game.steps, True


def soak(steps: int, seed: str) -> bool:
    """Until `steps` are done, or one fails."""
    tell(f"seed {seed}: {steps} steps of {', '.join(KINDS)}")
    started = reported = time.monotonic()
    done = number = 0
    well = True
    while well and done < steps:
        number += 1
        took, well = play(list(KINDS)[number % len(KINDS)], f"{seed} {number}")
        done += took
        now = time.monotonic()
        if now - reported > REPORT_EVERY_S or not well or done >= steps:
            reported = now
            tell(f"seed {seed}: {done} steps in {number} games, {done / (now - started):.0f}/s")
    return well


def main() -> int:
    signal.signal(signal.SIGALRM, hangs)
    asked = os.environ.get("GAME", "")
    if asked:
        kind, seed = asked.split(" ", 1)
        well = play(kind, seed)[1]
    else:
        well = soak(int(os.environ.get("STEPS", "1000000")), os.environ.get("SEED", "1"))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
