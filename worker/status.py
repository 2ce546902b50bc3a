"""What a rank tells its launcher: JSON lines on a pipe, and a beat that shows that it lives."""

from __future__ import annotations

import contextlib
import json
import os
import threading

BEAT_S = 1.0


class Status:
    """From any thread. Without a launcher (torchrun) it says nothing."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def say(self, event: str, **members: object) -> None:
        if self._fd is None:
            return
        line = json.dumps({"event": event, **members}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            os.write(self._fd, line)

    def start_beating(self) -> None:
        """A thread that beats as long as this process runs Python code."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        forever = threading.Event()
        while not forever.wait(BEAT_S):
            self.say("beat")
