"""Threads that make prompts ready, in which tenants take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from enginelink.turns import FairQueue

Result = TypeVar("Result")


class TurnThreads:
    """For use from one event loop. What waits for a thread waits in a queue of its tenant, so one that sends thousands
    of prompts waits behind itself. `close` waits for what runs and ends them."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._free = threads
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def run(self, tenant: bytes, cost: int, work: Callable[[], Result]) -> Result:
        """`work` on a thread, once it is the tenant's turn; `cost` is what the turn counts for."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.push(tenant, turn, cost)
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.drop(tenant, turn)
            else:
                self._ended()
            raise
        running = self._threads.submit(work)

        def ended(_: object) -> None:
            """On the thread; or here where it is cancelled before it began. The loop may be gone by now."""
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ended)

        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _ended(self) -> None:
        self._free += 1
        self._begin_next()

    def _begin_next(self) -> None:
        for tenant, turn in self._waiting.order():
            if not self._free:
                break
            if not turn.cancelled():
                self._free -= 1
                self._waiting.take(tenant, turn)
                turn.set_result(None)
