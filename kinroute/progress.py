"""Shows what a user waits for: a bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """Named steps, several at a time. Use as a context manager; `begin` a step, `advance` it, `end` it.

    `keep_bars`: whether a step that ended keeps its bar; else it becomes a line above those that go on.
    """

    def __init__(self, console: Console | None = None, *, keep_bars: bool = True) -> None:
        self._console = console or Console(file=sys.stderr)
        self._keep_bars = keep_bars
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, step: str) -> None:
        self._began_s[step] = time.monotonic()
        if self._bars is not None:
            self._tasks[step] = self._bars.add_task(step, total=None)
        else:
            self._console.print(f"{step} ...", highlight=False)

    def advance(self, step: str, fraction: float) -> None:
        """`fraction` of the step is done, 0 to 1."""
        if self._bars is not None:
            self._bars.update(self._tasks[step], total=1.0, completed=fraction)

    def end(self, step: str, failed: bool = False) -> None:
        if self._bars is not None and self._keep_bars:
            self._bars.update(self._tasks[step], total=1.0, completed=1.0)
            return
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(step))
        took = f"{time.monotonic() - self._began_s[step]:.1f} s"
        self._console.print(f"{step}: {f'failed after {took}' if failed else took}", highlight=False)
