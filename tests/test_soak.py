"""`make soak` goes through where all is well, and says where it was not."""

from __future__ import annotations

import os
import subprocess
import sys

BREAKS_THE_CORE = """
import sys
from tests import soak
from worker.core.runs import Run
Run.effective = lambda run, tier: run.stretches.priority_at(run.ends[tier] - 1)
sys.exit(soak.main())
"""


def soaked(*command: str, **asked: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=os.environ | asked, capture_output=True, text=True, check=False
    )


def test_a_sound_core_goes_through_a_short_soak() -> None:
    ended = soaked("-m", "tests.soak", STEPS="5000", SEED="7")

    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.startswith("seed 7: 5000 steps")


def test_a_core_whose_eviction_ignores_what_hangs_below_is_found_and_its_game_is_named() -> None:
    ended = soaked("-c", BREAKS_THE_CORE, STEPS="100000", SEED="7")

    assert ended.returncode == 1
    assert 'make soak GAME="caches 7 ' in ended.stdout
    assert "AssertionError" in ended.stdout


def test_one_game_is_played_again_by_its_seed() -> None:
    ended = soaked("-c", BREAKS_THE_CORE, GAME="caches 7 2")

    assert ended.returncode == 1
    assert 'GAME="caches 7 2"' in ended.stdout
