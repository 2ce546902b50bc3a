"""`kinroute demo` against a system of real processes with a tiny model, as `kinroute up` would have noted it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinroute.settings import CONTEXT_CACHE, GENERATION_CACHE
from tests.e2e.system import System
from tests.tiny_models import make_tiny_model

DEMO_S = 100.0
BLOCK = 64
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """`demoting` and `plain` are edges, each with a context worker of its own: only one of those demotes sub-agents."""
    folder = tmp_path_factory.mktemp("demo")
    model = make_tiny_model(folder / "tiny", max_position_embeddings=4096)
    shape = {"tokens_per_block": BLOCK, "max_tokens": 32_768}
    with System(folder / "system", model) as system:
        generation = system.start_worker("generation", role="generation", kv_cache_config=GENERATION_CACHE | shape)
        for name, cache in (("demoting", CONTEXT_CACHE), ("plain", GENERATION_CACHE)):
            context = system.start_worker(f"{name}-context", role="context", kv_cache_config=cache | shape)
            system.start_edge(name, [context], [generation])
        system.wait_ready(*system.parts.values())
        yield system


def play(system: System, edge: str, home: Path, **note: Any) -> str:
    """What the demo shows of `edge`, in one line. `note`: what `up` would have written."""
    folder = home / "kinroute"
    folder.mkdir(parents=True)
    (folder / "up.json").write_text(json.dumps(note))
    played = subprocess.run(
        [sys.executable, "-m", "kinroute", "demo", "--url", system.parts[edge].http, "--key", system.key],
        env=os.environ | {"XDG_STATE_HOME": str(home), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=DEMO_S,
        check=False,
    )
    assert played.returncode == 0, played.stderr
    return " ".join(played.stdout.split())


def test_the_demo_shows_what_was_demoted_what_survived_and_the_restoration_of_one_that_comes_back(
    system: System, tmp_path: Path
) -> None:
    edge, context = system.parts["demoting"], system.parts["demoting-context"]

    shown = play(system, "demoting", tmp_path / "home", url=edge.http, workers={context.grpc: context.admin})

    assert "parent, turn 2" in shown
    for child in ("sub-agent 1: owns", "sub-agent 2: owns"):
        told = shown.partition(child)[2].partition("sub-agent 1 came back")[0]
        assert "35 → 1 │ demoted" in told.partition("sub-agent 2: owns")[0], shown
    assert "│ parent │ 35 │ survives: a prefix that it only reused" in shown
    assert "│ 35 │ survives: another conversation extends it" in shown, "what both sub-agents share"
    assert "came back." in shown
    assert "priority 1 → 35" in shown.partition("came back.")[2]


def test_where_nothing_is_demoted_the_demo_says_how_to_have_it(system: System, tmp_path: Path) -> None:
    edge, context = system.parts["plain"], system.parts["plain-context"]

    shown = play(system, "plain", tmp_path / "home", url=edge.http, workers={context.grpc: context.admin})

    assert "demotes no sub-agents: set finished_subagent_priority" in shown
    assert "sub-agent 1, again" in shown


def test_against_a_system_that_up_does_not_run_here_the_demo_plays_without_blocks(
    system: System, tmp_path: Path
) -> None:
    shown = play(system, "demoting", tmp_path / "home", url="http://127.0.0.1:1")

    assert "only of workers that `kinroute up` runs on this machine" in shown
    assert "sub-agent 1, again" in shown
