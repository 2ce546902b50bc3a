"""A file's lines, gzipped or plain, as its first bytes say. Whatever is no text of JSON is named by its line."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Generator
from pathlib import Path

from kinroute.replay.faults import TraceError

GZIP = b"\x1f\x8b"
MAX_LINE_BYTES = 1 << 30
_PEEKED_BYTES = 4096


def lines_of(file: Path) -> Generator[tuple[int, bytes]]:
    """Every line that is not blank, with its number from 1. Raises OSError, or TraceError where the file is damaged."""
    number = 0
    try:
        with file.open("rb", buffering=0) as raw, _unzipped(raw) as opened:
            _require_text(file, opened)
            while line := opened.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise TraceError(file, number, f"a line of less than {MAX_LINE_BYTES} bytes")
                if not line.isspace():
                    yield number, line
    except EOFError:
        raise TraceError(file, number + 1, "the rest of the gzip file, which is cut off") from None
    except (gzip.BadGzipFile, zlib.error) as problem:
        raise TraceError(file, number + 1, f"gzip data that is whole ({problem})") from problem


def whole_text(file: Path) -> bytes:
    """Raises OSError, or TraceError where the file is damaged."""
    last = 0
    parts: list[bytes] = []
    for number, line in lines_of(file):
        parts.append(b"\n" * (number - last - 1))
        parts.append(line)
        last = number
    return b"".join(parts)


def _unzipped(raw: io.FileIO) -> io.BufferedReader:
    zipped = raw.read(len(GZIP)) == GZIP
    raw.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=raw) if zipped else raw, 1 << 20)


def _require_text(file: Path, opened: io.BufferedReader) -> None:
    begin = opened.peek(_PEEKED_BYTES)[:_PEEKED_BYTES]
    if not begin:
        raise TraceError(file, 1, "a trace, but the file is empty")
    if b"\0" in begin or not begin.lstrip().startswith((b"{", b"[")):
        raise TraceError(file, 1, "JSON, gzipped or plain, but the file is something else")
