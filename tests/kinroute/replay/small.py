"""One family whose blocks can be counted by hand, and the command that replays it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kinroute.replay.recorded import request, session, write

ONCE = ("--lanes", "1", "--warmup", "0", "--requests", "6")
"""One play of the family, from its beginning: its last answer is so long that no play begins before."""


def _turn(t: float, blocks: tuple[int, int], who: str, parent: str | None = None, dur: float = 1.0) -> dict[str, Any]:
    kind = "root" if parent is None else "sub"
    return request(t, blocks, dur=dur, output=1, conversation=who, parent=parent, kind=kind)


def write_family(path: Path) -> Path:
    """29 prompt blocks of 4 tokens. `a` finds 2 of its own again, whatever the policy. 21 blocks are there when `new`
    has come, so 18 pages are too few: LRU gives up the 4 blocks that `old` asks for at last, and the rule of
    sub-agents those of `child`, that `a` came back from."""
    return write(
        path,
        session(
            _turn(0, (50, 4), "old"),
            _turn(5, (0, 2), "a"),
            _turn(10, (20, 6), "child", "a"),
            _turn(20, (0, 3), "a"),
            _turn(30, (30, 9), "new"),
            _turn(40, (50, 5), "old", dur=1000.0),
        ),
    )


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "kinroute", "replay", *map(str, arguments)]


def replay(*arguments: str | Path, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """The command as a process, on a terminal of so many columns that is none."""
    environment = os.environ | {"COLUMNS": str(columns)}
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, check=False, timeout=60)
