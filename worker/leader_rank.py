"""Rank 0: serves on its event loop, drives the group on its engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVarTuple, Unpack

import structlog
import uvloop

from worker.commands import Command, Stop
from worker.exits import ExitCode
from worker.leader_engine import LeaderEngine
from worker.place import Place
from worker.servers import Servers
from worker.service import Opened, Service
from worker.settings import WorkerSettings
from worker.status import Status

FAREWELL_S = 0.3
SWITCH_S = 0.0005
STOP_DEADLINE_S = 5.0

Arguments = TypeVarTuple("Arguments")

log = structlog.get_logger()


class LeaderRank:
    """`run` on the main thread; what other threads have to say is brought to its loop."""

    def __init__(self, settings: WorkerSettings, place: Place, status: Status) -> None:
        self._settings = settings
        self._place = place
        self._status = status
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._end: asyncio.Future[ExitCode]
        self._loop: asyncio.AbstractEventLoop
        self._service: Service

    def run(self) -> ExitCode:
        # The event loop and the engine thread take turns; Python's 5 ms would be most of a step.
        sys.setswitchinterval(SWITCH_S)
        code: ExitCode = uvloop.run(self._serve())
        return code

    async def _serve(self) -> ExitCode:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self._service = Service(self._settings, self._inbox.put)
        self._service.metrics.count_mismatches(self._place.mismatches)
        servers = Servers(self._service, self._settings.listen)
        await servers.start()
        self._status.say("listening")
        self._hear_stop()
        engine = LeaderEngine(
            self._settings,
            self._place,
            self._inbox,
            self._service.metrics,
            self._service.instance_id,
            on_opened=lambda opened: self._on_loop(self._opened, opened),
            on_step=lambda step: self._on_loop(self._service.deliver, step),
            on_failed=lambda why, code, recording: self._on_loop(self._failed, why, code, recording),
        )
        engine.start()
        code = await self._end
        if code is not ExitCode.STOPPED:
            await asyncio.sleep(FAREWELL_S)
            return code
        await self._service.drain()
        await servers.stop()
        self._inbox.put(Stop())
        await asyncio.to_thread(engine.join, STOP_DEADLINE_S)
        return ExitCode.FAILED if engine.is_alive() else ExitCode.STOPPED

    def _hear_stop(self) -> None:
        """The launcher says so on stdin; without one, signals do."""
        if self._place.launcher_pid is not None:
            self._loop.add_reader(sys.stdin.fileno(), self._stop)
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        if self._place.launcher_pid is not None:
            self._loop.remove_reader(sys.stdin.fileno())
        if not self._end.done():
            self._end.set_result(ExitCode.STOPPED)

    def _on_loop(self, call: Callable[[Unpack[Arguments]], None], *arguments: *Arguments) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody is left to hear it.
            self._loop.call_soon_threadsafe(call, *arguments)

    def _opened(self, opened: Opened) -> None:
        self._service.opened(opened)
        self._status.say("ready")
        log.info("ready", pages=opened.num_pages, max_context_length=opened.served.max_context_length)

    def _failed(self, why: str, code: ExitCode, recording: Path | None) -> None:
        """Edges hear of it first, so that they can try elsewhere; then this process ends.

        Where the recording lies is the operator's to know, not the callers'.
        """
        if self._service.is_live():
            recorded = {} if recording is None else {"recording": str(recording)}
            log.error("the group is lost", why=why, **recorded)
            self._service.fail(why)
            self._status.say("failed", why=why, mismatches=self._service.metrics.num_mismatches, **recorded)
        if not self._end.done():
            self._end.set_result(code)
