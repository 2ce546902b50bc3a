"""An event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import uvloop


class LoopThread:
    """Runs from construction to `close`, which cancels what still runs there, calls `at_end` on the loop, and waits."""

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._lock = threading.Lock()
        self._closed = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def call(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Have the loop call it soon, in the order of these calls. From any thread. False: closed, and it won't."""
        with self._lock:
            if self._closed:
                return False
            self._loop.call_soon_threadsafe(function, *arguments)
            return True

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._at_end()
