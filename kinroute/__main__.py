"""The command `kinroute`. Each subcommand is imported when it is asked for, so that none pays for another."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kinroute.key_arguments import add_key_commands
from kinroute.problem import Problem
from kinroute.processes import die_with_parent
from kinroute.record_arguments import add_record_command
from kinroute.replay.arguments import add_replay_arguments, asked
from kinroute.token_arguments import add_token_commands
from kinroute.trace_arguments import add_trace_commands

VERSION = "0.1.0"


def _up(arguments: argparse.Namespace) -> int:
    from kinroute.up import up

    return up(arguments.config, port=arguments.port, admin_port=arguments.admin_port, new_key=arguments.new_key)


def _edge(arguments: argparse.Namespace) -> int:
    from configuration.reading import SettingsError
    from edge.app import run_edge
    from edge.settings import load_settings

    try:
        settings = load_settings(arguments.config)
    except SettingsError as error:
        raise Problem(str(error)) from error
    return run_edge(settings)


def _worker(arguments: argparse.Namespace) -> int:
    from configuration.reading import SettingsError
    from worker.app import run_worker
    from worker.settings import load_settings

    try:
        settings = load_settings(arguments.config)
    except SettingsError as error:
        raise Problem(str(error)) from error
    return run_worker(settings)


def _demo(arguments: argparse.Namespace) -> int:
    from kinroute.demo import demo

    return demo(url=arguments.url, key=arguments.key)


def _replay_recording(arguments: argparse.Namespace) -> int:
    from kinroute.recordings import replay_recording

    return replay_recording(
        arguments.file, check=arguments.check, decisions=arguments.decisions, as_json=arguments.json
    )


def _replay(arguments: argparse.Namespace) -> int:
    from kinroute.replay.command import replay

    command = shlex.join(["kinroute", *sys.argv[1:]])
    return replay(asked(arguments, arguments.parser), command=command, version=VERSION)


def _bench(arguments: argparse.Namespace) -> int:
    from bench.__main__ import main as bench

    return bench(arguments.rest)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kinroute", description="Serves language models to families of agents.")
    parser.add_argument("--version", action="version", version=f"kinroute {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    up = command("up", _up, "Start an edge and its workers on this machine; Ctrl-C stops them all.")
    up.add_argument("--config", type=Path, metavar="FILE", help="YAML; without it, the embedded model is served")
    up.add_argument("--port", type=int, metavar="N", help="HTTP port of the edge (default 8000, or as configured)")
    up.add_argument(
        "--admin-port", type=int, metavar="N", help="admin port of the edge (default 8001, or as configured)"
    )
    up.add_argument("--new-key", action="store_true", help="replace the API key; the old one stops working")
    edge = command("edge", _edge, "Run one edge. Every key can be overridden: KINROUTE_EDGE_<KEY>, __ between levels.")
    edge.add_argument("--config", type=Path, metavar="FILE", help="YAML")
    worker = command(
        "worker", _worker, "Run one worker and its ranks. Overrides: KINROUTE_WORKER_<KEY>, __ between levels."
    )
    worker.add_argument("--config", type=Path, metavar="FILE", help="YAML")
    demo = command(
        "demo", _demo, "Play a parent and two sub-agents against a running system, and show who reused what."
    )
    demo.add_argument("--url", help="the edge's address (default: the system that `kinroute up` runs here)")
    demo.add_argument("--key", help="API key (default: the one that `kinroute up` made)")
    replay = command("replay", _replay, "Show on recorded traffic what a retention policy is worth.")
    replay.set_defaults(parser=replay)
    add_replay_arguments(replay)
    recording = command(
        "replay-recording",
        _replay_recording,
        "Carry out again what a worker recorded. Exit code 0: it decides as it did; 1: it does not; 2: unreadable.",
    )
    recording.add_argument("file", type=Path, metavar="FILE", help="a segment, or a folder of them: its last one")
    recording.add_argument("--check", action="store_true", help="check every invariant after every plan; slow")
    recording.add_argument("--decisions", type=_count, default=0, metavar="N", help="show the last N decisions")
    recording.add_argument("--json", action="store_true", help="all of it as JSON")
    add_key_commands(commands)
    add_token_commands(commands)
    add_trace_commands(commands)
    add_record_command(commands)
    bench = command("bench", _bench, "Measure this machine; ratios side by side in one run.")
    bench.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="see `kinroute bench --help`")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    die_with_parent()
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except Problem as problem:
        sys.stderr.write(f"{problem}\n")
        return problem.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read is gone; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
