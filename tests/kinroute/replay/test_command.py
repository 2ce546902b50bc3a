"""`kinroute replay` as a person runs it: a process, with files and exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from kinroute.__main__ import main
from tests.kinroute.replay.browser import CHROMIUM, Page
from tests.kinroute.replay.recorded import request, session, write
from tests.kinroute.replay.small import ONCE, command, replay, write_family
from tests.kinroute.replay.test_recorded_runs import Recorded

DAMAGED = json.dumps(session(request(0, (0, 2)))).encode() + b'\n{"sess'


@dataclass(frozen=True)
class Replayed:
    table: str
    told: dict[str, Any]
    html: str

    def run(self, policy: str, seed: int = 1) -> dict[str, Any]:
        (found,) = (run for run in self.told["runs"] if (run["policy"], run["seed"]) == (policy, seed))
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    folder = tmp_path_factory.mktemp("replayed")
    trace, told, html = write_family(folder / "family.jsonl"), folder / "told.json", folder / "report.html"
    done = replay(
        trace, *ONCE, "--policy", "subagent", "--capacity", "18", "--seed", "1,2", "--json", told, "--html", html
    )
    assert done.returncode == 0, done.stderr
    return Replayed(done.stdout, json.loads(told.read_text()), html.read_text())


@pytest.mark.parametrize("seed", [1, 2])
def test_each_run_is_what_is_counted_by_hand(replayed: Replayed, seed: int) -> None:
    names = ("hit_blocks", "prompt_blocks", "uncached_tokens", "gap_closed", "lru_needs_blocks", "upper_bound")
    counted = {
        policy: [replayed.run(policy, seed)[name] for name in names] for policy in ("lru", "subagent", "optimum")
    }

    assert counted == {
        "lru": [2, 29, 108, 0.0, None, False],
        "subagent": [6, 29, 92, 1.0, 22, False],
        "optimum": [6, 29, 92, 1.0, 22, True],
    }


def test_a_run_stands_against_lru_and_the_ceiling(replayed: Replayed) -> None:
    lru, ours = replayed.run("lru"), replayed.run("subagent")

    assert lru["block_hit_ratio"] == pytest.approx(2 / 29)
    assert lru["points_below_ceiling"] == lru["points_below"] == pytest.approx(100 * 4 / 29)
    assert ours["points_below"] == pytest.approx(0.0)
    assert ours["hit_ratio_vs_lru"] == pytest.approx(4 / 29)
    assert ours["uncached_vs_lru"] == pytest.approx(92 / 108 - 1)
    assert ours["extra_memory"] == pytest.approx(22 / 18 - 1)
    assert replayed.told["ceiling"][0]["hit_blocks"] == 6


def test_a_run_tells_what_it_demoted_and_its_tails(replayed: Replayed) -> None:
    lru, ours = replayed.run("lru"), replayed.run("subagent")

    assert [run["demoted_blocks"] for run in (lru, ours)] == [0, 6]
    assert [run["regretted_blocks"] for run in (lru, ours)] == [0, 0]
    assert [run["dropped_blocks"] for run in (lru, ours)] == [9, 5]
    assert (ours["offloaded_blocks"], ours["onboarded_blocks"]) == ({}, {})
    assert {name: tail["worst"] for name, tail in ours["tails"].items()} == {
        "all": 36, "root": 36, "sub": 24, "session": 92,
    }  # fmt: skip
    assert [(one["uncached_tokens"], one["p50"], one["worst"]) for one in ours["sessions"]] == [(92, 8, 36)]


def test_every_run_has_the_same_members(replayed: Replayed) -> None:
    lru, ours, optimum = (replayed.run(policy) for policy in ("lru", "subagent", "optimum"))

    assert lru.keys() == ours.keys() == optimum.keys()
    for run in (lru, ours, optimum):
        assert (run["role"], run["hints"]) == ("aggregated", "parent,stop")
        assert run["tiers"] == {"device": 18, "host": 0, "disk": 0}
        assert (run["gap_s"], run["lanes"], run["capacity_blocks"]) == (10.0, 1, 18)
    assert optimum["digest"] is None


def test_several_seeds_have_a_mean_and_a_worst(replayed: Replayed) -> None:
    (ours,) = (one for one in replayed.told["summaries"] if one["policy"] == "subagent")

    assert ours["seeds"] == [1, 2]
    assert ours["mean"]["gap_closed"] == ours["worst"]["gap_closed"] == 1.0
    assert ours["mean"]["uncached_tokens"] == 92


def test_the_table_fits_80_columns(replayed: Replayed) -> None:
    lines = replayed.table.splitlines()
    (ours,) = (line.split() for line in lines if line.strip().startswith("subagent"))

    assert max(map(len, lines)) <= 80
    assert "…" not in replayed.table
    assert " ".join(ours) == "subagent 20.69 % 0.00 92 -14.8 % 100.0 % 6/0 +22.2 %"


def test_lru_is_placed_under_the_ceiling_and_tiers_count(tmp_path: Path) -> None:
    trace = write_family(tmp_path / "family.jsonl")
    done = replay(
        trace, *ONCE, "--policy", "lru", "--points", "10", "--tiers", "host=4", "--role", "context", "--json", "-"
    )
    runs = json.loads(done.stdout)["runs"]

    assert {(run["policy"], run["placed"], run["role"]) for run in runs} == {
        ("lru", True, "context"), ("optimum", True, "context"),
    }  # fmt: skip
    assert {tuple(run["tiers"].items()) for run in runs} == {
        (("device", run["capacity_blocks"]), ("host", 4), ("disk", 0)) for run in runs
    }
    (lru,) = (run for run in runs if run["policy"] == "lru")
    assert lru["offloaded_blocks"]["host"] > 0


def test_the_closed_loop_runs_in_both_orders_with_the_costs_of_a_file(tmp_path: Path) -> None:
    trace, costs, out = write_family(tmp_path / "family.jsonl"), tmp_path / "costs.yaml", tmp_path / "out"
    costs.write_text("step_s: 0.5\nprefill_token_s: 0.25\n")
    done = replay(
        trace, *ONCE, "--policy", "subagent", "--capacity", "18", "--closed-loop", "--costs", costs, "--json", out
    )
    told = json.loads(out.read_text())

    assert [(run["policy"], run["order"]) for run in told["runs"]] == [
        ("lru", "lru first"), ("subagent", "lru first"), ("lru", "lru last"), ("subagent", "lru last"),
    ]  # fmt: skip
    lru, ours = (run["service"] for run in told["runs"][:2])
    # Prompts of 16, 8, 24, 4, 36 and 20 tokens are computed, and 4 for the last one where `old` is still there.
    assert (lru["ttft_mean_s"], ours["ttft_mean_s"]) == (
        pytest.approx(0.5 + 0.25 * 108 / 6, rel=0.01), pytest.approx(0.5 + 0.25 * 92 / 6, rel=0.01),
    )  # fmt: skip
    assert told["runs"][1]["service_vs_lru"]["ttft_mean_s"] == pytest.approx(-4 / 30, rel=0.02)
    assert told["costs"]["step_s"] == 0.5
    assert "came to the same in both" in " ".join(done.stdout.split())


def test_a_workers_recording_is_played_once_and_says_so(tmp_path: Path) -> None:
    worker, out = Recorded(), tmp_path / "out"
    for key, first in enumerate((10, 30, 10, 30), 1):
        worker.ask(key, [first + at for at in range(16)], max_tokens=1, conversation=str(first))
        worker.run()
    recording = worker.write(tmp_path / "segment-000001.kinrec")
    done = replay(recording, "--policy", "lru", "--capacity", "6", "--warmup", "0", "--window", "2", "--json", out)
    told = json.loads(out.read_text())

    assert " ".join(done.stdout.split()).startswith("A worker's recording: its arrivals and lengths are played again")
    assert [(run["policy"], run["gap_s"], run["seed"], run["prompt_blocks"]) for run in told["runs"]] == [
        ("lru", None, None, 16), ("optimum", None, None, 16),
    ]  # fmt: skip
    assert [(one["first"], one["requests"], one["prompt_blocks"]) for one in told["windows"]] == [(0, 2, 8), (2, 2, 8)]
    assert "6 blocks, windows of 2 requests, each from LRU's cache: LRU " in " ".join(done.stdout.split())


def test_a_recording_is_not_played_beside_other_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = Recorded()
    worker.ask(1, [1, 2, 3, 4], max_tokens=1)
    worker.run()
    recording = worker.write(tmp_path / "segment-000001.kinrec")

    code = main(["replay", str(recording), str(write_family(tmp_path / "t.jsonl")), "--policy", "lru"])

    said = "argument TRACE: a worker's recording is played as it stands, so not together with other traces\n"
    assert (code, capsys.readouterr().err) == (2, said)


def test_costs_that_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("step_s: -1\n")

    code = main(["replay", "synthetic:plain", "--policy", "lru", "--closed-loop", "--costs", str(costs)])

    (line,) = capsys.readouterr().err.splitlines()
    assert (code, line.partition(str(costs))[0]) == (2, "argument --costs: ")
    assert "step_s is -1" in line


def test_a_step_that_fails_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    trace = write_family(tmp_path / "family.jsonl")
    done = replay(trace, *ONCE, "--policy", "lru", "--points", "5", "--tiers", "host=500", "--json", tmp_path / "out")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "FAILED ceiling and capacities, gap 10 s, 1 lanes, seed 1: LRU is 5 points under the ceiling with "
    )
    assert json.loads((tmp_path / "out").read_text())["failed"][0]["step"].startswith("ceiling and capacities")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "argument TRACE: {} cannot be read: No such file or directory"),
        (b"", "{}, line 1: expected a trace, but the file is empty"),
        (b'{"a": 1}\n', "{}, line 1: expected a trace: sessions of ours"),
        (DAMAGED, "{}, line 2: expected "),
    ],
    ids=["missing", "empty", "foreign", "damaged"],
)
def test_a_trace_that_is_none_is_named_with_its_line(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    if content is not None:
        trace.write_bytes(content)

    code = main(["replay", str(trace), "--policy", "lru"])

    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith(said.format(trace))


def test_traces_of_one_replay_have_blocks_of_one_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "other.jsonl", session(request(0, (0, 2)), block_tokens=8))

    code = main(["replay", str(write_family(tmp_path / "t.jsonl")), str(other), "--policy", "lru"])

    assert (code, capsys.readouterr().err) == (
        2,
        "argument TRACE: must have blocks of one size, not of 4 and 8 tokens\n",
    )


def test_ctrl_c_ends_every_process_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("synthetic:plain:9", "--requests", "3000", "--policy", "lru", "--capacity", "4000,5000", "--jobs", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("lru, 5,000 blocks"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()

    assert len(children) == 2
    assert not any(child.is_running() for child in children)
    assert (code, "Traceback" in said) == (130, False)


def test_the_report_is_whole_and_asks_nobody_for_anything(replayed: Replayed) -> None:
    assert "Gap closed" in replayed.html
    assert "20.69 %" in replayed.html
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", replayed.html)


@pytest.mark.skipif(CHROMIUM is None, reason="the Debian package chromium is not installed")
def test_a_browser_draws_the_report_without_an_error_or_a_request(replayed: Replayed, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(replayed.html)
    with Page(tmp_path / "profile") as page:
        page.open(file, width=1280)
        wide = page.value(DRAWN)
        faults = [told for told in page.events if told[0] in FAULTS]
        asked = {told["request"]["url"] for method, told in page.events if method == "Network.requestWillBeSent"}
        page.open(file, width=400, dark=True)
        narrow = page.value(DRAWN)

    assert faults == []
    assert {url for url in asked if not url.startswith("data:")} == {file.as_uri()}
    assert wide == [5, 5, True]
    assert narrow == wide


DRAWN = """[
  document.querySelectorAll(".plot").length,
  [...document.querySelectorAll(".plot")].filter(plot => plot.querySelector(".trace, .trace path, .bars path")).length,
  document.documentElement.scrollWidth <= innerWidth]"""
FAULTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


def test_who_stops_reading_gets_no_traceback(tmp_path: Path) -> None:
    trace = write_family(tmp_path / "family.jsonl")
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    done = subprocess.run(
        command(trace, *ONCE, "--policy", "lru", "--capacity", "18", "--json", "-"),
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    reader.communicate()

    assert (done.returncode, "Error" in done.stderr) == (1, False)
