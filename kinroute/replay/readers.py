"""Traces of every format that is known, told apart by what is in them.

A worker's own recording is known by its first bytes, every other by the members of the first JSON object:
  ours               session, block_tokens, requests
  kv-cache-tester    id, block_size, requests; a file is one object, or has one on each line
  Mooncake           timestamp, input_length, output_length, hash_ids
  AIPerf, Dynamo     the same with session_id
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kinroute.replay import hash_rows, recorded_runs, session_files, traces
from kinroute.replay.families import PRESETS, synthesize
from kinroute.replay.faults import TraceError
from kinroute.replay.lines import lines_of, whole_text
from kinroute.replay.traces import Session

SYNTHETIC = "synthetic:"
USUAL_SESSIONS = 74
USUAL_SEED = 1
SUFFIXES = (".json", ".jsonl", ".gz")
EXPECTED = (
    "a trace: sessions of ours (session, block_tokens, requests), a session file of kv-cache-tester (id, block_size, "
    "requests), rows of Mooncake, AIPerf or Dynamo (input_length, output_length, hash_ids), or a worker's recording"
)


def read_sessions(paths: Sequence[Path], *, block_tokens: int | None = None) -> list[Session]:
    """Every session of these files, in their order; of a folder, of its files by name. A path `synthetic:PRESET` is no
    file: its sessions are made up, as `kinroute.replay.families` says.

    `block_tokens`: of formats that do not say it themselves; None is what fits their lengths. Raises OSError, or
    TraceError with file, line and what was expected there.
    """
    made: list[Session] = []
    for path in paths:
        if str(path).startswith(SYNTHETIC):
            made.extend(_synthetic(path))
        elif recorded_runs.is_recording(path):
            made.extend(recorded_runs.sessions_of(path))
        else:
            made.extend(session for file in _files(path) for session in _read(file, block_tokens))
    return made


def _synthetic(path: Path) -> Iterator[Session]:
    """`synthetic:PRESET[:SESSIONS[:SEED]]`."""
    found = re.fullmatch(f"{SYNTHETIC}([^:]*)(?::([1-9][0-9]{{0,5}})(?::([0-9]{{1,18}}))?)?", str(path))
    if found is None or found[1] not in PRESETS:
        raise TraceError(
            path,
            0,
            f"{SYNTHETIC}PRESET[:SESSIONS[:SEED]], PRESET one of {', '.join(PRESETS)}, SESSIONS from 1 to 999999",
        )
    preset, sessions, seed = found[1], int(found[2] or USUAL_SESSIONS), int(found[3] or USUAL_SEED)
    return synthesize(PRESETS[preset], sessions, seed)


def _files(path: Path) -> Sequence[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        raise TraceError(path, 0, f"files of traces in this folder ({', '.join(SUFFIXES)})")
    return files


def _read(file: Path, block_tokens: int | None) -> Iterable[Session]:
    lines = lines_of(file)
    first = next(lines, None)
    if first is None:
        raise TraceError(file, 1, "a trace, but the file is blank")
    number, line = first
    if line.strip() == b"{":
        lines.close()
        return [session_files.parse(whole_text(file), file)]
    members = _members(file, number, line)
    everything = itertools.chain([first], lines)
    if {"requests", "block_tokens"} <= members.keys():
        return traces.parse(everything, file)
    if {"requests", "block_size"} <= members.keys():
        return _session_files(everything, file)
    if "hash_ids" in members:
        with_sessions = members.get("session_id") is not None
        return hash_rows.parse(everything, file, with_sessions=with_sessions, block_tokens=block_tokens)
    raise TraceError(file, number, EXPECTED)


def _session_files(lines: Iterable[tuple[int, bytes]], file: Path) -> Iterator[Session]:
    for number, line in lines:
        yield session_files.parse(line, file, number)


def _members(file: Path, number: int, line: bytes) -> dict[str, Any]:
    """Of the object on this line, undecoded but for what is short."""
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise TraceError(file, number, f"an object of JSON on one line ({problem})") from problem
    return {name: None if bytes(raw) == b"null" else raw for name, raw in found.items()}
