"""The arguments of `kinroute trace`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kinroute.problem import Problem

PRESETS = (
    "plain",
    "resumed-children",
    "background-children",
    "wide-fan-out",
    "abandoned-parents",
    "no-sub-agents",
)
"""Those of `kinroute.replay.families`, which imports more than a help text needs."""


def add_trace_commands(commands: Any) -> None:
    text = "Make traces up, and look into traces."
    traces = commands.add_parser("trace", help=text, description=text).add_subparsers(
        dest="trace_command", required=True, metavar="COMMAND"
    )
    text = "Write a trace of made-up families: the same for the same seed."
    made = traces.add_parser("synthesize", help=text, description=text)
    made.set_defaults(run=_synthesize)
    made.add_argument("preset", metavar="PRESET", choices=PRESETS, help=f"one of {', '.join(PRESETS)}")
    made.add_argument("out", type=Path, metavar="OUT", help="gzipped where it ends in .gz")
    made.add_argument("--sessions", type=_some, default=74, metavar="N", help="default 74")
    made.add_argument("--seed", type=_count, default=1, metavar="S", help="default 1")
    text = "Print what the sessions of traces are like: lengths, gaps, sub-agents."
    measured = traces.add_parser("measure", help=text, description=text)
    measured.set_defaults(run=_measure)
    measured.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="files, folders or synthetic:PRESET")
    measured.add_argument("--json", action="store_true")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text!r}")
    return int(text)


def _some(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, not {text!r}")
    return int(text)


def _synthesize(arguments: argparse.Namespace) -> int:
    from kinroute.replay.families import PRESETS as SHAPES
    from kinroute.replay.families import synthesize
    from kinroute.replay.writing import TraceWriter

    try:
        with TraceWriter(arguments.out) as out:
            for session in synthesize(SHAPES[arguments.preset], arguments.sessions, arguments.seed):
                out.write(session)
    except OSError as error:
        raise Problem(f"{arguments.out} cannot be written: {error.strerror}.") from error
    sys.stdout.write(f"{out.sessions} sessions, {out.requests} requests in {arguments.out}\n")
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    from kinroute.replay.faults import TraceError
    from kinroute.replay.measures import measure
    from kinroute.replay.readers import read_sessions

    try:
        told = dataclasses.asdict(measure(read_sessions(arguments.traces)))
    except OSError as error:
        raise Problem(f"{error.filename} cannot be read: {error.strerror}.") from error
    except TraceError as error:
        raise Problem(f"{error}.") from error
    except ValueError as error:
        raise Problem(f"Nothing can be measured: {error}.") from error
    if arguments.json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return 0
    for name, value in told.items():
        shown = f"median {value['median']:g}, p90 {value['p90']:g}" if isinstance(value, dict) else f"{value:.4g}"
        sys.stdout.write(f"{name:20} {shown}\n")
    return 0
