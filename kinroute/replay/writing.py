"""Writes sessions as a trace file of our format, a line each, gzipped where the file's name ends in .gz."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from kinroute.replay.traces import Session


class TraceWriter:
    """A context manager. The file has its name once it is whole; until then it ends in `.part`. Raises OSError."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._part = file.with_name(file.name + ".part")
        self._encode = msgspec.json.Encoder().encode
        self._raw: IO[bytes] = self._part.open("wb")
        # Neither name nor time: the same sessions give the same bytes.
        self._out: IO[bytes] = (
            gzip.GzipFile("", "wb", fileobj=self._raw, mtime=0)  # type: ignore[assignment]
            if file.suffix == ".gz"
            else self._raw
        )
        self.sessions = 0
        self.requests = 0

    def write(self, session: Session) -> None:
        self._out.write(self._encode(session) + b"\n")
        self.sessions += 1
        self.requests += len(session.requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._out.close()
        finally:
            self._raw.close()
        if error is None:
            os.replace(self._part, self._file)
        else:
            self._part.unlink(missing_ok=True)
