"""Child processes of `kinroute up`: each is heard through JSON lines on its stdout, and none outlives its parent.

A child gets a session of its own, so that Ctrl-C reaches `up` alone, which then ends its children in order.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "KINROUTE_PARENT_PID"


def die_with_parent() -> None:
    """In a child, first thing: ask the system for SIGTERM when the parent that started it is gone."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit(1)


@dataclass(frozen=True, slots=True)
class News:
    """What a child said (`event` and its other members), or that it ended (`exited`, with `code`)."""

    child: str
    event: str
    members: dict[str, Any] = field(default_factory=dict)


class Child:
    """`python -m kinroute ARGUMENTS`, its stderr in a log file."""

    def __init__(self, name: str, arguments: list[str], log: Path, news: queue.SimpleQueue[News]) -> None:
        self.name = name
        self.log = log
        self._news = news
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kinroute", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            )
        assert self._process.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                try:
                    members = json.loads(line)
                    event = members.pop("event")
                except (ValueError, KeyError, AttributeError):
                    continue
                self._news.put(News(self.name, event, members))
        self._news.put(News(self.name, "exited", {"code": self._process.wait()}))

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to the whole session after `grace_s`; returns when it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._listener.join(1.0)

    def last_lines(self, count: int = 12) -> str:
        """The end of its log, for a person who must find out why it ended."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""
