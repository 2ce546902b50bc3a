from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from kinroute.replay.calibration import read_costs
from kinroute.replay.service import CostModel
from worker.core.step_load import StepLoad
from worker.telemetry import Metrics

TRUE = CostModel(
    step_s=0.02, prefill_token_s=5e-5, prefill_context_s=2e-9, decode_token_s=3e-4, decode_context_s=1.5e-8
)


def scrapes(path: Path, count: int, *, decodes: bool = True, noise: float = 0.0, starts: int = 1) -> None:
    """A worker with these costs under loads that differ, scraped now and then and started so often."""
    dice = random.Random(1)
    told: list[bytes] = []
    for _ in range(starts):
        metrics = Metrics()
        for _ in range(count):
            told.append(generate_latest(metrics.registry))
            prompts, answers = dice.randint(1, 400), dice.randint(1, 12) if decodes else 0
            context = dice.randint(1000, 80_000)
            for step in range(dice.randint(5, 30)):
                load = StepLoad(prompts, prompts * context, answers, answers * (context + step))
                metrics.count_forward(load, TRUE.seconds(load) * dice.uniform(1 - noise, 1 + noise))
    path.write_bytes(b"".join(told))


def members(costs: CostModel) -> dict[str, Any]:
    return dataclasses.asdict(costs)


@pytest.mark.parametrize("starts", [1, 3])
def test_costs_follow_from_scrapes_of_a_workers_metrics(tmp_path: Path, starts: int) -> None:
    file = tmp_path / "scrapes"
    scrapes(file, 12, starts=starts)

    assert members(read_costs(file)) == pytest.approx(members(TRUE), rel=1e-3)


def test_times_that_scatter_give_costs_that_are_near(tmp_path: Path) -> None:
    file = tmp_path / "scrapes"
    scrapes(file, 200, noise=0.2)

    found = read_costs(file)

    load = StepLoad(300, 300 * 40_000, 8, 8 * 40_000)
    assert found.seconds(load) == pytest.approx(TRUE.seconds(load), rel=0.05)
    assert min(members(found).values()) >= 0


def test_what_a_worker_never_did_costs_what_is_assumed(tmp_path: Path) -> None:
    file = tmp_path / "scrapes"
    scrapes(file, 12, decodes=False)

    found = read_costs(file)

    assert found.decode_token_s == CostModel().decode_token_s
    assert found.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=1e-3)


@pytest.mark.parametrize("text", ['{"step_s": 0.5, "max_num_tokens": 4096}', "step_s: 0.5\nmax_num_tokens: 4096\n"])
def test_costs_are_read_as_they_are_written(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs"
    file.write_text(text)

    assert read_costs(file) == dataclasses.replace(CostModel(), step_s=0.5, max_num_tokens=4096)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an object of JSON or YAML is due"),
        ("[1]", "an object of JSON or YAML is due"),
        ("{", "an object of JSON or YAML is due"),
        ("steps: 1", "'steps' is no cost: step_s, "),
        ("step_s: -1", "step_s is -1: seconds, a number from 0"),
        ("step_s: .nan", "step_s is nan: seconds, a number from 0"),
        ("step_s: true", "step_s is True: seconds, a number from 0"),
        ("max_batch_size: 0", "max_batch_size is 0: a whole number from 1 on"),
        ("kinroute_worker_output_tokens_total 5.0\n", "kinroute_worker_forward_seconds_sum is due in every scrape"),
        ("kinroute_worker_forward_seconds_sum x\n", "is 'x': a number is due"),
    ],
)
def test_a_file_that_holds_no_costs_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "costs"
    file.write_text(text)

    with pytest.raises(ValueError, match=said) as refused:
        read_costs(file)

    assert str(refused.value).startswith(f"{file}: ")
    assert "\n" not in str(refused.value)


def test_too_few_scrapes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "scrapes"
    scrapes(file, 4)

    with pytest.raises(ValueError, match="4 scrapes with steps between them: at least 6 are due"):
        read_costs(file)
