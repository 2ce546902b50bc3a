"""Tasks for `kinroute.replay.arms`, importable by the processes that carry them out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Square:
    number: int

    @property
    def name(self) -> str:
        return f"square of {self.number}"

    def run(self, on_progress: Callable[[float], None]) -> tuple[int, int]:
        on_progress(0.5)
        return self.number**2, os.getpid()


@dataclass(frozen=True, slots=True)
class Raising:
    name: str = "the raising one"

    def run(self, on_progress: Callable[[float], None]) -> None:
        raise ValueError("no\nroom")


@dataclass(frozen=True, slots=True)
class Killed:
    name: str = "the killed one"

    def run(self, on_progress: Callable[[float], None]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Sleeper:
    """Leaves a file named by its process id in `folder`, then sleeps."""

    folder: Path
    name: str = "the sleeper"

    def run(self, on_progress: Callable[[float], None]) -> None:
        (self.folder / str(os.getpid())).touch()
        time.sleep(600)
