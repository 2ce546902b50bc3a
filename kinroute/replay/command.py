"""`kinroute replay`: what a retention policy is worth on recorded traffic."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from kinroute.problem import Misuse, Problem
from kinroute.progress import Steps
from kinroute.replay.arguments import Asked
from kinroute.replay.arm import Arm
from kinroute.replay.arms import Advanced, Arms, Began, Ended, Failed
from kinroute.replay.calibration import read_costs
from kinroute.replay.findings import Findings, findings
from kinroute.replay.readers import read_sessions
from kinroute.replay.service import CostModel
from kinroute.replay.simulated import cache_config
from kinroute.replay.sweep import Sweep
from kinroute.replay.table import by_windows, show
from kinroute.replay.tasks import SweepTask
from kinroute.replay.told_traces import ToldTrace, tell
from kinroute.replay.traces import TraceError

STDOUT = Path("-")


def replay(asked: Asked, *, command: str, version: str) -> int:
    """Shows and writes what was asked for. 0: all of it was found; 1: an arm failed, which stderr names.

    Raises Misuse where a trace cannot be read or no worker has such a policy, Problem where a report cannot be made.
    """
    _refuse(asked)
    costs = _costs(asked)
    traces = _traces(asked)
    render = _renderer() if asked.html is not None else None
    sweep = Sweep(asked, costs, recorded=traces[0].is_recording)
    failed = _carry_out(sweep, asked.jobs)
    found = findings(asked, costs, traces, list(sweep.outcomes()), failed, command=command, version=version)
    if asked.json != STDOUT:
        _show(found)
    for one in failed:
        sys.stderr.write(f"FAILED {one.task.name}: {one.why}\n{one.story}")
    if asked.json is not None:
        _write(asked.json, json.dumps(found.told(), indent=1) + "\n")
    if render is not None and asked.html is not None:
        _write(asked.html, render(found))
    return 1 if failed else 0


def _show(found: Findings) -> None:
    console = Console()
    for note in found.notes:
        console.print(note, highlight=False)
    show(console, found.shown, found.summaries, found.traces[0].block_tokens)
    for outcome in found.outcomes:
        if outcome.windows:
            console.print(by_windows(outcome.place, outcome.windows), highlight=False)


def _refuse(asked: Asked) -> None:
    """What can be known before anything is read."""
    for policy in asked.policies:
        try:
            cache_config(Arm(policy, capacity_blocks=1), block_tokens=1)
        except ValueError as error:
            raise Misuse(f"argument --policy: {error}") from error


def _traces(asked: Asked) -> list[ToldTrace]:
    """Read once before anything is simulated, so that a mistake is told at once."""
    told: list[ToldTrace] = []
    for path in asked.traces:
        try:
            told.append(tell(path, read_sessions([path], block_tokens=asked.block_tokens)))
        except TraceError as error:
            raise Misuse(str(error)) from error
        except OSError as error:
            raise Misuse(f"argument TRACE: {path} cannot be read: {error.strerror or error}") from error
    if not any(trace.requests for trace in told):
        raise Misuse(f"argument TRACE: there is no request in {', '.join(trace.name for trace in told)}")
    if len({trace.is_recording for trace in told}) > 1:
        raise Misuse("argument TRACE: a worker's recording is played as it stands, so not together with other traces")
    sizes = sorted({trace.block_tokens for trace in told})
    if len(sizes) > 1:
        raise Misuse(f"argument TRACE: must have blocks of one size, not of {' and '.join(map(str, sizes))} tokens")
    return told


def _costs(asked: Asked) -> CostModel:
    if asked.costs is None:
        return CostModel()
    try:
        return read_costs(asked.costs)
    except ValueError as error:
        raise Misuse(f"argument --costs: {error}") from error
    except OSError as error:
        raise Misuse(f"argument --costs: {asked.costs} cannot be read: {error.strerror or error}") from error


def _renderer() -> Callable[[Findings], str]:
    try:
        from kinroute.replay.report import render
    except ImportError as error:
        raise Problem(f"--html needs {error.name}: pip install 'kinroute[replay]'") from error
    return render


def _carry_out(sweep: Sweep, jobs: int) -> list[Failed[SweepTask]]:
    """Every task of the sweep, `jobs` at a time; those that failed."""
    failed: list[Failed[SweepTask]] = []
    done = 0
    everything = f"all {sweep.num_tasks} steps"
    console = Console(stderr=True)
    with Arms[SweepTask](jobs) as arms, Steps(console, keep_bars=False) as steps:
        for task in sweep.begin():
            arms.add(task)
        if console.is_terminal:
            steps.begin(everything)
        for news in arms.news():
            match news:
                case Began():
                    steps.begin(news.task.name)
                    continue
                case Advanced():
                    steps.advance(news.task.name, news.share)
                    continue
                case Failed():
                    failed.append(news)
                    found = None
                case Ended():
                    found = news.found
            steps.end(news.task.name, failed=isinstance(news, Failed))
            done += 1
            if console.is_terminal:
                steps.advance(everything, done / max(sweep.num_tasks, done))
            for task in sweep.feed(news.task, found):
                arms.add(task)
    return failed


def _write(file: Path, text: str) -> None:
    """Whole or not at all. Raises Problem."""
    if file == STDOUT:
        sys.stdout.write(text)
        return
    try:
        handle, draft = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            os.chmod(draft, 0o666 & ~_umask())
            os.replace(draft, file)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise Problem(f"{file} cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
