"""`kinroute record`: from the streams of edges to a trace file."""

from __future__ import annotations

import asyncio
import secrets
import signal
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.status import Status

from kinroute.problem import Problem
from kinroute.recorder.families import Families
from kinroute.recorder.following import SILENCE_S, Asked, Following
from kinroute.recorder.told import ToldTurn
from kinroute.replay.writing import TraceWriter

CONNECT_S = 10.0
SALT_BYTES = 32


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is asked for. `requests`, `seconds`: after which it ends by itself. `ca_file`: whom to trust, for https."""

    urls: Sequence[str]
    out: Path
    key: str | None = None
    requests: int | None = None
    seconds: float | None = None
    block_tokens: int = 64
    ca_file: Path | None = None


def record(asked: Recorded) -> int:
    """Until it is over, or SIGINT or SIGTERM: all end it well. Raises Problem, once what was recorded is written."""
    try:
        with TraceWriter(asked.out) as writer:
            recorder = _Recorder(asked, Families(asked.block_tokens, writer.write))
            recorder.run()
            if not writer.requests:
                raise recorder.problem or Problem(
                    f"Nothing was recorded, and {asked.out} was not written: no request ended."
                )
    except OSError as error:
        raise Problem(f"{asked.out} cannot be written: {error.strerror}.") from error
    sys.stdout.write(f"{writer.requests} requests of {writer.sessions} families in {asked.out}\n")
    if recorder.problem is not None:
        raise recorder.problem
    return 0


class _Recorder:
    def __init__(self, asked: Recorded, families: Families) -> None:
        self._asked = asked
        self._families = families
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._failed = 0
        self.problem: Problem | None = None

    def run(self) -> None:
        """Returns when all is written."""
        with self._console.status("Connecting ...") as status:
            self._status = status if self._console.is_terminal else None
            asyncio.run(self._follow_all())
        self._families.close()
        if self._families.cut:
            self._say(f"{self._families.cut} families were ended early, to stay within memory.")
        if self._failed:
            self._say(f"{self._failed} requests that failed before their first token are left out.")

    async def _follow_all(self) -> None:
        asked = self._asked
        self._over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._over.set)
        stream = Asked(secrets.token_bytes(SALT_BYTES), asked.block_tokens, asked.key)
        timeout = httpx.Timeout(CONNECT_S, read=SILENCE_S)
        async with httpx.AsyncClient(timeout=timeout, verify=_trusted(asked.ca_file)) as client:
            everyone = [Following(client, url, stream, self._tell, self._say) for url in asked.urls]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run(one)) for one in everyone]
                try:
                    async with asyncio.timeout(asked.seconds):
                        await self._over.wait()
                except TimeoutError:
                    """As long as was asked."""
                for task in running:
                    task.cancel()

    async def _run(self, one: Following) -> None:
        try:
            await one.run()
        except Problem as problem:
            self.problem = problem
            self._over.set()

    def _tell(self, told: ToldTurn, began_s: float) -> None:
        if self._over.is_set():
            return
        if told.stop is None and not told.output_tokens:
            self._failed += 1
            return
        families = self._families
        families.add(told, began_s)
        if self._status is not None:
            self._status.update(f"{families.turns} requests of {len(families)} families; Ctrl-C ends and writes")
        if families.turns == self._asked.requests:
            self._over.set()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _trusted(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise Problem(f"{ca_file} is no file of certificates that can be read: {error}.") from error
