"""The arguments of `kinroute replay`, and what they ask for. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

Role: TypeAlias = Literal["context", "aggregated"]
POLICIES = ("lru", "subagent", "return_index")
OPTIMUM = "optimum"
POINTS = (5.0, 2.5, 1.0, 0.4)
HINTS = ("parent", "stop", "final")
MAX_COUNT = 2**31 - 1
MAX_TP = 64
LONGEST_SHOWN = 60

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call of the command asks for.

    `capacities`: in blocks; None places them so that LRU sits `points` under the ceiling. `policies` hold neither LRU
    nor the optimum: these two are the ends of every scale, so they are always there. `json` of "-" is stdout.
    """

    traces: tuple[Path, ...]
    block_tokens: int | None
    policies: tuple[str, ...]
    capacities: tuple[int, ...] | None
    points: tuple[float, ...]
    gaps_s: tuple[float, ...]
    lanes: tuple[int, ...]
    seeds: tuple[int, ...]
    requests: int
    warmup: float
    role: Role
    hints: str
    host_blocks: int
    disk_blocks: int
    tp: int
    closed_loop: bool
    costs: Path | None
    window: int
    jobs: int
    html: Path | None
    json: Path | None


def add_replay_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kinroute replay TRACE... [--policy NAME,...] [--capacity N,...] [--help for the rest]"
    option = command.add_argument
    option("traces", type=Path, nargs="+", metavar="TRACE", help="recorded sessions, or a worker's recording")
    option(
        "--policy", type=_listed(_policy), default=POLICIES, metavar="NAME,…",
        help="lru, subagent, return_index, optimum (default lru,subagent,return_index; lru and optimum always run)",
    )  # fmt: skip
    option(
        "--capacity", type=_capacities, default=None, metavar="N,…",
        help="blocks of the device, or auto: placed by --points (default)",
    )  # fmt: skip
    option(
        "--points", type=_listed(_points), default=None, metavar="N,…",
        help="how many points of hit ratio LRU sits under the infinite cache (default 5,2.5,1,0.4)",
    )  # fmt: skip
    option(
        "--block-tokens", type=_from(1), default=None, metavar="N",
        help="tokens of a block, for traces that do not say (default: what fits their lengths)",
    )  # fmt: skip
    option("--gap", type=_listed(_seconds), default=(10.0,), metavar="S,…", help="idle gaps are cut to it (default 10)")
    option("--lanes", type=_listed(_from(1)), default=(48,), metavar="N,…", help="sessions alive (default 48)")
    option("--seed", type=_listed(_from(0)), default=(1,), metavar="N,…", help="of the order of sessions (default 1)")
    option("--requests", type=_from(1), default=20_000, metavar="N", help="how many are replayed (default 20000)")
    option("--warmup", type=_share, default=0.25, metavar="X", help="share of them not counted (default 0.25)")
    option(
        "--role", choices=("context", "aggregated"), default="aggregated",
        help="replies are reusable on an aggregated worker only (default aggregated)",
    )  # fmt: skip
    option(
        "--hints", type=_hints, default="parent,stop", metavar="NAME,…",
        help="what is told of conversations: parent, stop, final, or none (default parent,stop)",
    )  # fmt: skip
    option("--tiers", type=_tiers, default=(0, 0), metavar="host=N,disk=N", help="blocks below the device (default 0)")
    option("--tp", type=_from(1, MAX_TP), default=1, metavar="N", help="simulated ranks; 1 is fastest (default 1)")
    option("--closed-loop", action="store_true", help="arrivals wait for answers: a better cache shortens the run")
    option("--costs", type=Path, metavar="FILE", help="costs of prefill and decode, with --closed-loop")
    option(
        "--window", type=_from(1), default=1000, metavar="N",
        help="requests of a window, of a worker's recording: the optimum is found for each (default 1000)",
    )  # fmt: skip
    option("--jobs", type=_from(1), default=None, metavar="N", help="processes at a time (default: one a core)")
    option("--html", type=Path, metavar="FILE", help="write a report with plots, one file that needs no network")
    option("--json", type=Path, metavar="FILE", help="write every figure; - is stdout, instead of the table")


def asked(arguments: argparse.Namespace, command: argparse.ArgumentParser) -> Asked:
    """What was asked for; ends the process with exit code 2 and one sentence where arguments exclude each other."""
    if arguments.points is not None and arguments.capacity is not None:
        command.error("argument --points: not together with numbers in --capacity, as it places capacities itself")
    if arguments.costs is not None and not arguments.closed_loop:
        command.error("argument --costs: only together with --closed-loop, as only there answers take what they cost")
    if arguments.html is not None and arguments.html == arguments.json:
        command.error(f"argument --json: {arguments.json} is the file of --html too; name another")
    if str(arguments.html) == "-":
        command.error("argument --html: must be a file, not -, as the table is on stdout")
    for option, file in (("--html", arguments.html), ("--json", arguments.json)):
        if file is not None and str(file) != "-" and (file.is_dir() or not file.absolute().parent.is_dir()):
            command.error(f"argument {option}: must be a file in a folder that exists, not {file}")
    return Asked(
        traces=tuple(arguments.traces),
        block_tokens=arguments.block_tokens,
        policies=tuple(name for name in arguments.policy if name not in ("lru", OPTIMUM)),
        capacities=arguments.capacity,
        points=arguments.points or POINTS,
        gaps_s=arguments.gap,
        lanes=arguments.lanes,
        seeds=arguments.seed,
        requests=arguments.requests,
        warmup=arguments.warmup,
        role=arguments.role,
        hints=arguments.hints,
        host_blocks=arguments.tiers[0],
        disk_blocks=arguments.tiers[1],
        tp=arguments.tp,
        closed_loop=arguments.closed_loop,
        costs=arguments.costs,
        window=arguments.window,
        jobs=arguments.jobs or len(os.sched_getaffinity(0)),
        html=arguments.html,
        json=arguments.json,
    )


def _listed(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Several by commas, none twice."""

    def parse(text: str) -> tuple[T, ...]:
        values: list[T] = []
        for part in text.split(","):
            value = one(part.strip())
            if value in values:
                raise argparse.ArgumentTypeError(f"names {part.strip()} twice in {text!r}")
            values.append(value)
        return tuple(values)

    return parse


def _wrong(wanted: str, text: str) -> argparse.ArgumentTypeError:
    shown = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"
    return argparse.ArgumentTypeError(f"must be {wanted}, not {shown!r}")


def _from(least: int, most: int = MAX_COUNT) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= most):
            raise _wrong(f"a whole number from {least} to {most}", text)
        return int(text)

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise _wrong("seconds, a number from 0 on", text)
    return value


def _points(text: str) -> float:
    value = _number(text)
    if not 0 < value < 100:
        raise _wrong("points of hit ratio, a number between 0 and 100", text)
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise _wrong("a share from 0 to below 1", text)
    return value


def _policy(text: str) -> str:
    if text not in (*POLICIES, OPTIMUM):
        raise _wrong(f"one of {', '.join(POLICIES)}, {OPTIMUM}", text)
    return text


def _capacities(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    try:
        return _listed(_from(1))(text)
    except argparse.ArgumentTypeError as wrong:
        raise argparse.ArgumentTypeError(f"{wrong}; or auto") from wrong


def _hints(text: str) -> str:
    if text == "none":
        return text
    for name in _listed(str)(text):
        if name not in HINTS:
            raise _wrong(f"none, or some of {', '.join(HINTS)}", name)
    return text


def _tiers(text: str) -> tuple[int, int]:
    blocks = {"host": 0, "disk": 0}
    seen: set[str] = set()
    for part in text.split(","):
        name, equals, count = part.strip().partition("=")
        if name not in blocks or not equals or name in seen:
            raise _wrong("host=N, disk=N or both by a comma", text)
        seen.add(name)
        try:
            blocks[name] = _from(0)(count)
        except argparse.ArgumentTypeError as wrong:
            raise argparse.ArgumentTypeError(f"{name} {wrong}") from wrong
    return blocks["host"], blocks["disk"]


def told(asked: Asked) -> dict[str, Any]:
    """As JSON shows it."""
    return {
        "traces": [str(path) for path in asked.traces],
        "policies": ["lru", *asked.policies, OPTIMUM],
        "capacities": "auto" if asked.capacities is None else list(asked.capacities),
        "points": list(asked.points) if asked.capacities is None else None,
        "gaps_s": list(asked.gaps_s),
        "lanes": list(asked.lanes),
        "seeds": list(asked.seeds),
        "requests": asked.requests,
        "warmup": asked.warmup,
        "role": asked.role,
        "hints": asked.hints,
        "host_blocks": asked.host_blocks,
        "disk_blocks": asked.disk_blocks,
        "tp": asked.tp,
        "closed_loop": asked.closed_loop,
        "costs": None if asked.costs is None else str(asked.costs),
    }
