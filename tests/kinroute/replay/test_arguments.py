from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from kinroute.replay.arguments import Asked, add_replay_arguments, asked


def parse(*arguments: str) -> Asked:
    parser = argparse.ArgumentParser(prog="kinroute replay")
    add_replay_arguments(parser)
    return asked(parser.parse_args(["t.jsonl", *arguments]), parser)


def test_without_arguments_the_documented_sweep_is_asked_for() -> None:
    ours = parse()

    assert (ours.traces, ours.policies, ours.capacities) == ((Path("t.jsonl"),), ("subagent", "return_index"), None)
    assert (ours.points, ours.gaps_s, ours.lanes, ours.seeds) == ((5.0, 2.5, 1.0, 0.4), (10.0,), (48,), (1,))
    assert (ours.requests, ours.warmup, ours.role, ours.hints) == (20_000, 0.25, "aggregated", "parent,stop")
    assert (ours.host_blocks, ours.disk_blocks, ours.tp, ours.closed_loop) == (0, 0, 1, False)
    assert ours.jobs == len(os.sched_getaffinity(0))


def test_lists_are_by_commas() -> None:
    ours = parse("--capacity", "64,128", "--gap", "10,300.5", "--lanes", "48,160", "--seed", "1,2,3")

    assert (ours.capacities, ours.gaps_s, ours.lanes, ours.seeds) == ((64, 128), (10.0, 300.5), (48, 160), (1, 2, 3))
    assert parse("--points", "2.5,0.1").points == (2.5, 0.1)
    assert parse("--capacity", "auto", "--points", "1").capacities is None


def test_the_ends_of_every_scale_run_whether_they_are_named_or_not() -> None:
    assert parse("--policy", "return_index").policies == ("return_index",)
    assert parse("--policy", "optimum,lru,subagent").policies == ("subagent",)


def test_tiers_are_named() -> None:
    ours = parse("--tiers", "disk=7,host=3")

    assert (ours.host_blocks, ours.disk_blocks) == (3, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--policy", "lru,best"],
            "argument --policy: must be one of lru, subagent, return_index, optimum, not 'best'",
        ),
        (["--policy", "lru,lru"], "argument --policy: names lru twice in 'lru,lru'"),
        (
            ["--capacity", "12,0"],
            "argument --capacity: must be a whole number from 1 to 2147483647, not '0'; or auto",
        ),
        (["--points", "0"], "argument --points: must be points of hit ratio, a number between 0 and 100, not '0'"),
        (["--points", "1", "--capacity", "9"], "argument --points: not together with numbers in --capacity"),
        (["--gap", "-1"], "argument --gap: must be seconds, a number from 0 on, not '-1'"),
        (["--gap", "nan"], "argument --gap: must be seconds, a number from 0 on, not 'nan'"),
        (["--lanes", "4.5"], "argument --lanes: must be a whole number from 1 to 2147483647, not '4.5'"),
        (["--seed", ""], "argument --seed: must be a whole number from 0 to 2147483647, not ''"),
        (["--requests", "9" * 5000], "argument --requests: must be a whole number from 1 to 2147483647, not '9"),
        (["--warmup", "1"], "argument --warmup: must be a share from 0 to below 1, not '1'"),
        (["--role", "generation"], "argument --role: invalid choice: 'generation' (choose from"),
        (["--hints", "parent,mood"], "argument --hints: must be none, or some of parent, stop, final, not 'mood'"),
        (["--tiers", "host"], "argument --tiers: must be host=N, disk=N or both by a comma, not 'host'"),
        (["--tiers", "host=x"], "argument --tiers: host must be a whole number from 0 to 2147483647, not 'x'"),
        (["--tp", "65"], "argument --tp: must be a whole number from 1 to 64, not '65'"),
        (["--jobs", "0"], "argument --jobs: must be a whole number from 1 to 2147483647, not '0'"),
        (["--costs", "c.yaml"], "argument --costs: only together with --closed-loop"),
        (["--html", "/nowhere/x.html"], "argument --html: must be a file in a folder that exists"),
        (["--html", "x", "--json", "x"], "argument --json: x is the file of --html too"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)

    *usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert error.startswith(f"kinroute replay: error: {message}")
    assert len(usage) == 1
