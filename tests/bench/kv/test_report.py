from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import __main__ as command
from bench.kv import recorded, report, trees, turns
from bench.kv.demotion import DemotionSize
from bench.kv.idle import IdleSize
from bench.kv.limits import LimitsSize
from bench.kv.memory import MemorySize
from bench.kv.recorded import RecordedSize
from bench.kv.run_tree import RunTree
from bench.kv.turns import TurnsSize
from tests.kinroute.replay.recorded import request, session, write

SIZES = report.Sizes(
    turns=TurnsSize(
        warm_tokens=256, turns=4, new_tokens=16, tokens_per_block=4, side_tokens=8, far=3, far_rounds=8, near_rounds=8
    ),
    recorded=RecordedSize(alive=2, num_pages=64, tokens_per_block=2, warm_up=3, requests=6),
    demotion=DemotionSize(
        of_blocks=(9, 18), runs=3, of_runs=(1, 3), blocks=9, falling=(4, 8), tokens_per_block=2, times=2
    ),
    idle=IdleSize(idle_blocks=(186, 372), tokens_per_block=2, steps=3),
    memory=MemorySize(blocks=500, tokens_per_block=4),
    limits=LimitsSize(warm_tokens=64, new_tokens=8, tokens_per_block=4, copies=2, times=3),
)


def trace(folder: Path) -> Path:
    child = request(2.0, (0, 4), (30, 2), conversation="child", parent="root", kind="sub")
    return write(folder / "small.jsonl.gz", session(request(0.0, (0, 8)), child, request(4.0, (0, 12))))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return report.run(trace(tmp_path_factory.mktemp("traces")), SIZES)


def rows(measured: dict[str, object], name: str) -> list[dict[str, Any]]:
    found = measured[name]
    assert isinstance(found, list)
    return found


def test_every_manager_is_measured_in_every_shape_by_parts(measured: dict[str, object]) -> None:
    found = rows(measured, "turns")

    assert [(row["shape"], row["memory"], row["manager"]) for row in found] == [
        (shape, memory, manager)
        for shape in turns.SHAPES
        for memory in turns.MEMORIES
        for manager in (turns.RUN_TREE, turns.PICKLED, turns.BYTES)
    ]
    assert all(set(turns.PARTS) <= row.keys() for row in found)
    assert all(0 < row["p10"] <= row["median"] <= row["p90"] <= row["p99"] for row in found)
    assert [row["ratio"] for row in found[::3]] == [1] * 4


def test_recorded_requests_are_the_same_for_every_manager(measured: dict[str, object]) -> None:
    found = rows(measured, "recorded")

    assert len({row["prompt_tokens"] for row in found}) == 1
    assert all(0 < row["cached"] < 1 and row["mean"] > 0 for row in found)
    assert measured["trace"] == "small.jsonl.gz"


def test_demotion_lowers_all_that_a_conversation_owns(measured: dict[str, object]) -> None:
    assert [(row["runs"], row["blocks"]) for row in rows(measured, "by_blocks")] == [(3, 9), (3, 18)]
    assert [(row["runs"], row["blocks"]) for row in rows(measured, "by_runs")] == [(1, 9), (3, 9)]
    assert [row["pages"] for row in rows(measured, "falling")] == [4, 8]


def test_memory_is_measured_in_processes_of_their_own(measured: dict[str, object]) -> None:
    tree, per_block = rows(measured, "memory")

    assert tree["blocks"] == per_block["blocks"] > 200
    assert tree["runs"] < tree["blocks"] / 4
    assert all(row["traced_bytes"] > 4 * 4 for row in (tree, per_block))


def test_steps_are_measured_beside_growing_numbers_of_idle_blocks(measured: dict[str, object]) -> None:
    few, many = rows(measured, "idle")

    assert 0 < few["idle_blocks"] < many["idle_blocks"]
    assert few["decode_us"] > 0 < few["empty_us"]


def test_what_dominates_is_named_beside_its_limit_and_every_aim_is_judged(measured: dict[str, object]) -> None:
    costs = [row["us"] for row in rows(measured, "dominates") if (row["shape"], row["memory"]) == ("forked", "far")]

    assert costs == sorted(costs, reverse=True)
    assert {row["part"] for row in rows(measured, "dominates")} == set(turns.PARTS)
    assert all(isinstance(row["met"], bool) for row in rows(measured, "aims"))


def test_synthetic_runs_have_the_recorded_lengths() -> None:
    lengths = trees.run_lengths(1_000, np.random.default_rng(0))

    assert sum(length <= 4 for length in lengths) == 100
    assert 19 <= np.median(lengths) <= 21
    assert 90 <= np.mean(lengths) <= 96


def test_a_synthetic_tree_has_a_run_for_each_length_but_for_the_last_which_nothing_forks() -> None:
    tree = RunTree(4_096, 2)

    trees.grow(tree, 2, 930, np.random.default_rng(0))

    assert tree.num_blocks == sum(trees.run_lengths(10, np.random.default_rng(0)))
    assert tree.num_runs == 9
    tree.replica.check()


def test_the_command_writes_all_of_it_as_json_or_shows_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The command has no option for sizes: it is there to measure.
    monkeypatch.setattr(report, "Sizes", lambda: SIZES)

    assert command.main(["kv", "--trace", str(trace(tmp_path)), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["machine"].keys() >= {"processor", "commit"}
    assert said["parts"]["kv"]["recorded"]

    assert command.main(["kv", "--json", str(tmp_path / "results.json")]) == 0
    shown = capsys.readouterr().out
    assert "kv, turns" in shown
    assert "kv, aims" in shown
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["kv"]["recorded"] == []


def test_a_trace_that_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "Sizes", lambda: SIZES)
    damaged = trace(tmp_path)
    damaged.write_bytes(b"{]")

    for file, why in ((damaged, f"{damaged}, line 1: expected"), (tmp_path / "none", "does not exist")):
        with pytest.raises(SystemExit) as ended:
            command.main(["kv", "--trace", str(file)])
        assert ended.value.code == 2
        assert why in capsys.readouterr().err


def test_a_trace_of_another_format_is_replayed_too(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * turn, "input_length": 512 * (turn + 2), "output_length": 8, "hash_ids": [*range(turn + 2)]}
        for turn in range(8)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    measured = recorded.measure(file, replace(SIZES.recorded, num_pages=8192, tokens_per_block=32))

    assert measured[0]["prompt_tokens"] >= 1024
    assert measured[0]["cached"] > 0
