"""Runs tasks side by side, each in a process with memory of its own; none outlives the command.

A task is any picklable object with a `name` and a `run`. `python -m kinroute.replay.arms FD` is the other end: it takes
one task from the pipe, tells how far it is, and hands back what it found.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from kinroute.problem import Problem
from kinroute.processes import PARENT_VARIABLE, die_with_parent

TOLD_EVERY_S = 0.2


class Task(Protocol):
    @property
    def name(self) -> str:
        """What a person calls it; no two have the same."""

    def run(self, on_progress: Callable[[float], None]) -> object:
        """What it found; picklable. Tells the share of it that is done, 0 to 1, as often as it likes."""


AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass(frozen=True, slots=True)
class Began(Generic[AnyTask]):
    task: AnyTask


@dataclass(frozen=True, slots=True)
class Advanced(Generic[AnyTask]):
    task: AnyTask
    share: float


@dataclass(frozen=True, slots=True)
class Ended(Generic[AnyTask]):
    task: AnyTask
    found: object
    took_s: float


@dataclass(frozen=True, slots=True)
class Failed(Generic[AnyTask]):
    """`why`: one line; `story`: the traceback, empty where the process was killed or a Problem was raised."""

    task: AnyTask
    why: str
    story: str


@dataclass(frozen=True, slots=True)
class _Running(Generic[AnyTask]):
    task: AnyTask
    process: subprocess.Popen[bytes]
    began_s: float


class Arms(Generic[AnyTask]):
    """At most `jobs` tasks at a time, in the order of `add`. Use as a context manager: leaving it ends them all."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._waiting: deque[AnyTask] = deque()
        self._running: dict[Connection, _Running[AnyTask]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._running.values():
            one.process.kill()
        for pipe, one in self._running.items():
            one.process.wait()
            pipe.close()
        self._running.clear()

    def add(self, task: AnyTask) -> None:
        """May be called between two pieces of news."""
        self._waiting.append(task)

    def news(self) -> Iterator[Began[AnyTask] | Advanced[AnyTask] | Ended[AnyTask] | Failed[AnyTask]]:
        """Until nothing is left to do."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._jobs:
                task = self._waiting.popleft()
                self._start(task)
                yield Began(task)
            for pipe in multiprocessing.connection.wait(list(self._running)):
                assert isinstance(pipe, Connection)
                yield self._hear(pipe)

    def _start(self, task: AnyTask) -> None:
        """The process has a session of its own, so that Ctrl-C reaches the command alone."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "kinroute.replay.arms", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            )
        self._running[ours] = _Running(task, process, time.monotonic())
        with contextlib.suppress(BrokenPipeError):  # it died at once, which reading tells
            ours.send(task)

    def _hear(self, pipe: Connection) -> Advanced[AnyTask] | Ended[AnyTask] | Failed[AnyTask]:
        one = self._running[pipe]
        try:
            said = pipe.recv()
        except (EOFError, ConnectionResetError):
            said = _Broke(_death(one.process.wait()), "")
        if isinstance(said, float):
            return Advanced(one.task, said)
        del self._running[pipe]
        pipe.close()
        one.process.wait()
        if isinstance(said, _Broke):
            return Failed(one.task, said.why, said.story)
        assert isinstance(said, _Found), f"{one.task.name} said {said!r}"
        return Ended(one.task, said.value, time.monotonic() - one.began_s)


@dataclass(frozen=True, slots=True)
class _Found:
    value: object


@dataclass(frozen=True, slots=True)
class _Broke:
    why: str
    story: str


def _death(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    hint = "; is there enough memory for so many --jobs?" if -code == signal.SIGKILL else ""
    return f"its process was ended by {signal.Signals(-code).name}{hint}"


def _carry_out(pipe: Connection) -> None:
    task = pipe.recv()
    next_s = 0.0

    def tell(share: float) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + TOLD_EVERY_S
            pipe.send(float(share))

    try:
        said: _Found | _Broke = _Found(task.run(tell))
    except Problem as problem:
        said = _Broke(str(problem), "")
    except Exception as error:  # noqa: BLE001 - whatever it is, the command names the arm and goes on with the others
        said = _Broke(" ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc())
    pipe.send(said)


if __name__ == "__main__":
    die_with_parent()
    # Imported by its own name, so that what it sends is what the command knows.
    from kinroute.replay import arms

    with Connection(int(sys.argv[1])) as inherited, contextlib.suppress(BrokenPipeError):
        arms._carry_out(inherited)
