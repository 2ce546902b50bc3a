"""Files with keys, read again when they change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from configuration.reading import SettingsError
from edge.keyring import KeyringError

POLL_S = 1.0
Value = TypeVar("Value")
Stamp = tuple[int, int, int, int] | None

log = structlog.get_logger()


def stamp_of(path: Path) -> Stamp:
    """Differs when the file was replaced or written to; links are followed. None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


class WatchedFile(Generic[Value]):
    """`value` is what `read` makes of the file at `path`: now, then again whenever the file changes.

    A file that cannot be used keeps what was there, with a warning. Making it raises what `read` raises: SettingsError
    or KeyringError.
    """

    def __init__(self, path: Path, read: Callable[[], Value], *, poll_s: float = POLL_S) -> None:
        self._path = path
        self._read = read
        self._poll_s = poll_s
        # Taken before the file is read: what changes meanwhile is read again.
        self._stamp = stamp_of(path)
        self.value = read()

    async def watch(self, users: Sequence[Callable[[Value], None]]) -> None:
        """Until cancelled; each of `users` is told of every new value, on the event loop."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look(users)

    async def look(self, users: Sequence[Callable[[Value], None]]) -> None:
        """Once, now."""
        if await asyncio.to_thread(self._reread):
            log.info("keys are read again", file=str(self._path))
            for use in users:
                use(self.value)

    def _reread(self) -> bool:
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.value = self._read()
        except (SettingsError, KeyringError) as error:
            log.warning("the keys stay as they were", file=str(self._path), why=str(error))
            return False
        return True
