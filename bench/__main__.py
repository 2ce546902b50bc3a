"""`kinroute bench [PART ...] [--json [FILE]] [--trace FILE]`: runs benchmarks one after the other; tables on stdout."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import describe
from kinroute.replay.faults import TraceError

PARTS = {
    "edge": "bench.edge",
    "long-prompt": "bench.long_prompt",
    "long-turns": "bench.long_turns",
    "trust": "bench.trust",
    "worker": "bench.worker",
    "handoff": "bench.handoff",
    "kv": "bench.kv.report",
    "replay": "bench.replay",
    "tiers": "bench.tiers",
    "ghosts": "bench.ghosts",
    "fairness": "bench.fairness",
    "attacks": "bench.attacks",
}
REPLAYING = ("kv", "replay")
"""Parts that take a trace."""
STDOUT = "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kinroute bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write everything that was measured there too; without FILE to stdout, in place of the tables",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded sessions that `kv` and `replay` play: ours, or of kv-cache-tester, Mooncake, AIPerf",
    )
    given = parser.parse_args(argv)
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]}: choose from {', '.join(PARTS)}")
    if given.trace is not None and not given.trace.exists():
        parser.error(f"argument --trace: {given.trace} does not exist")
    # Rows are wide; a terminal wraps them rather than cutting figures off.
    console = Console(width=max(200, Console().width), quiet=given.json == STDOUT)
    report: dict[str, Any] = {"machine": describe(), "parts": {}}
    console.print_json(data=report["machine"])
    for part in given.parts or PARTS:
        options = {"trace": given.trace} if part in REPLAYING else {}
        with Console(file=sys.stderr).status(f"Measuring {part} ..."):
            try:
                report["parts"][part] = importlib.import_module(PARTS[part]).run(**options)
            except TraceError as problem:
                parser.error(f"argument --trace: {problem}")
        show(console, part, report["parts"][part])
    if given.json is not None:
        text = json.dumps(report, indent=1)
        if given.json == STDOUT:
            print(text)
        else:
            Path(given.json).write_text(text)
    return 0


def show(console: Console, part: str, measured: dict[str, Any]) -> None:
    """Single figures as a table of two columns, and each list of rows as a table of its own."""
    figures = {name: value for name, value in measured.items() if not isinstance(value, (list, dict))}
    table = Table("figure", "value", title=part)
    for name, value in figures.items():
        table.add_row(name, _text(value))
    console.print(table)
    for name, rows in measured.items():
        if not isinstance(rows, list) or not rows:
            continue
        table = Table(*rows[0], title=f"{part}, {'in detail' if name == 'rows' else name}")
        for row in rows:
            table.add_row(*(_text(row.get(column, "")) for column in rows[0]))
        console.print(table)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
