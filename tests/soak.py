"""The machines of the cache manager, by seeded dice, for as many steps as asked: STEPS and SEED in the environment."""

from __future__ import annotations

import os
import random
import sys
import time

from tests.worker.core.cache_pair import RULES, CachePair

STEPS_PER_GAME = 400


def main() -> None:
    steps, seed = int(os.environ.get("STEPS", "1000000")), int(os.environ.get("SEED", "1"))
    started = time.monotonic()
    done = game = 0
    names = [name for name, often in RULES.items() for _ in range(often)]
    print(f"seed {seed}: {steps} steps", flush=True)
    while done < steps:
        dice = random.Random(f"{seed} {game}")
        pair = CachePair(dice.randrange)
        story = []
        for _ in range(STEPS_PER_GAME):
            name = dice.choice(names)
            try:
                if getattr(pair, name)(dice.randrange):
                    done += 1
                    story.append(name)
                    pair.compare()
            except Exception:
                print(f"seed {seed}, game {game}, step {len(story)} ({done} in all), {name}", flush=True)
                raise
        game += 1
        if game % 100 == 0:
            rate = done / (time.monotonic() - started)
            print(f"{done} steps, {rate:.0f}/s", flush=True)
    print(f"seed {seed}: {done} steps in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
