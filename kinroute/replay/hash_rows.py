"""JSONL of one request a line with `hash_ids`: Mooncake's, and AIPerf's and Dynamo's with a `session_id` besides.

Mooncake: `timestamp` in ms, `input_length`, `output_length`, and ids of blocks of 512 tokens, the last one part filled.
A request goes on with a conversation if it begins with all full blocks of that one's last prompt, and these are more
than the one that everybody has.

With `session_id`: later rows of a session say `timestamp`, or `delay` in ms after the last answer. If they repeat none
of their session's prompt they hold what is new: the prompt is all before it, answers as whole blocks, and that.
Where sessions have times the file is one session of ours, which keeps what they share; else each is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from kinroute.replay.chains import Chains, Uint64s
from kinroute.replay.checks import fault_of
from kinroute.replay.faults import TraceError, told
from kinroute.replay.timing import answered_s
from kinroute.replay.traces import Session, TracedRequest

USUAL_BLOCK_TOKENS = 512
BLOCK_TOKENS = tuple(2**power for power in range(13))
LEAST_SHARED_BLOCKS = 2


class _Line(msgspec.Struct):
    hash_ids: list[int]
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    delay_ms: float | None = None
    session_id: str | None = None
    block_size: int | None = None


T = TypeVar("T")
_decode = msgspec.json.Decoder(_Line).decode


@dataclass(slots=True)
class _Row:
    line: int
    session: str
    ids: Uint64s
    input_tokens: int
    output_tokens: int
    time_s: float | None
    delay_s: float


def parse(
    lines: Iterable[tuple[int, bytes]], file: Path, *, with_sessions: bool, block_tokens: int | None = None
) -> list[Session]:
    """`block_tokens` None: as the rows say, or else the size that fits all lengths, 512 first. Raises TraceError."""
    sizes = _Sizes(file, block_tokens)
    rows: list[_Row] = []
    for number, line in lines:
        try:
            row = _row(_decode(line), file, number, sizes, with_sessions=with_sessions)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            raise TraceError(file, number, f"a request with hash_ids ({told(problem)})") from problem
        rows.append(row)
    size = sizes.chosen()
    made = _sessions(rows, file, size) if with_sessions else [_chat(rows, file, size)]
    for session in made:
        fault = fault_of(session)
        if fault is not None:
            raise TraceError(file, 0, fault)
    return made


def _row(line: _Line, file: Path, number: int, sizes: _Sizes, *, with_sessions: bool) -> _Row:
    input_tokens = _one(line.input_length, line.input_tokens)
    output_tokens = _one(line.output_length, line.output_tokens)
    time_ms, delay_ms = _one(line.timestamp, line.created_time), _one(line.delay, line.delay_ms)
    for name, value in (("input_length", input_tokens), ("output_length", output_tokens)):
        if value is None or value < 0:
            raise TraceError(file, number, f"{name} from 0 on, not {value}")
    for name, when in (("timestamp", time_ms), ("delay", delay_ms)):
        if when is not None and not 0 <= when < math.inf:
            raise TraceError(file, number, f"{name} from 0 on, not {when}")
    if with_sessions and line.session_id is None:
        raise TraceError(file, number, "a session_id, as the rows before have it")
    if not with_sessions and line.session_id is not None:
        raise TraceError(file, number, "no session_id, as the rows before have none")
    if not with_sessions and time_ms is None:
        raise TraceError(file, number, "a timestamp")
    if time_ms is not None and delay_ms is not None:
        raise TraceError(file, number, "a timestamp or a delay, not both")
    if not all(0 <= block < 2**64 for block in line.hash_ids):
        raise TraceError(file, number, "hash_ids from 0 on, of 64 bits")
    assert input_tokens is not None
    assert output_tokens is not None
    ids = np.array(line.hash_ids, np.uint64)
    sizes.see(number, input_tokens, len(ids), line.block_size)
    time_s = None if time_ms is None else time_ms / 1000
    return _Row(number, line.session_id or "", ids, input_tokens, output_tokens, time_s, (delay_ms or 0.0) / 1000)


def _one(named: T | None, alias: T | None) -> T | None:
    return named if named is not None else alias


class _Sizes:
    """The sizes of blocks that fit every row so far, its last block part filled or left out."""

    def __init__(self, file: Path, given: int | None) -> None:
        self._file = file
        self._left: Sequence[int] = BLOCK_TOKENS if given is None else (given,)

    def see(self, line: int, tokens: int, blocks: int, stated: int | None) -> None:
        if stated is not None:
            self._left = [size for size in (stated,) if len(self._left) > 1 or size in self._left]
        fitting = [size for size in self._left if blocks in (tokens // size, -(-tokens // size))]
        if not fitting:
            sizes = ", ".join(map(str, self._left)) or "another size"
            raise TraceError(
                self._file, line, f"hash_ids for {tokens} tokens in blocks of {sizes}, not {blocks} of them"
            )
        self._left = fitting

    def chosen(self) -> int:
        return USUAL_BLOCK_TOKENS if USUAL_BLOCK_TOKENS in self._left else max(self._left)


def _chat(rows: Sequence[_Row], file: Path, block_tokens: int) -> Session:
    """Mooncake's: one session, whose conversations are recovered."""
    chains, last_full = Chains(), dict[int, str]()
    """By the last full block of a conversation's last prompt."""
    requests: list[TracedRequest] = []
    before_s = 0.0
    for row in rows:
        assert row.time_s is not None
        _require_order(file, row, before_s)
        before_s = row.time_s
        blocks = chains.runs(row.ids)
        full = min(row.input_tokens // block_tokens, len(row.ids))
        ids = [block for first, count in blocks for block in range(first, first + count)][:full]
        conversation = next((last_full.pop(block) for block in reversed(ids) if block in last_full), f"c{row.line}")
        if full >= LEAST_SHARED_BLOCKS:
            last_full[ids[-1]] = conversation
        requests.append(_request(row, row.time_s, conversation, blocks))
    return Session(_name(file), "mooncake", block_tokens, tuple(requests))


def _sessions(rows: Sequence[_Row], file: Path, block_tokens: int) -> list[Session]:
    by_session: dict[str, list[_Row]] = {}
    for row in rows:
        by_session.setdefault(row.session, []).append(row)
    timed = [turns[0].time_s is not None for turns in by_session.values()]
    if any(timed) and not all(timed):
        untimed = next(turns[0] for turns in by_session.values() if turns[0].time_s is None)
        raise TraceError(file, untimed.line, "a timestamp in the first row of every session, or in none")
    deltas = _are_deltas(by_session.values())
    chains = Chains()
    made: dict[str, list[TracedRequest]] = {}
    for name, turns in by_session.items():
        chains = chains if all(timed) else Chains()
        made[name] = _turns(turns, file, block_tokens, chains, deltas=deltas)
    if not all(timed):
        return [Session(name, "aiperf", block_tokens, tuple(requests)) for name, requests in made.items()]
    together = sorted((request for requests in made.values() for request in requests), key=lambda one: one.t_s)
    return [Session(_name(file), "aiperf", block_tokens, tuple(together))]


def _are_deltas(sessions: Iterable[Sequence[_Row]]) -> bool:
    """Some session has several rows, and no later one begins as its session does."""
    later = [(turns[0].ids[:1], turn.ids[:1]) for turns in sessions for turn in turns[1:] if len(turn.ids)]
    return bool(later) and not any(np.array_equal(first, other) for first, other in later)


def _turns(rows: Sequence[_Row], file: Path, block_tokens: int, chains: Chains, *, deltas: bool) -> list[TracedRequest]:
    requests: list[TracedRequest] = []
    so_far = np.empty(0, np.uint64)
    began_s = ended_s = 0.0
    own = 2**64 - 1
    """An id for a block of an answer, which no row names."""
    for row in rows:
        if row.time_s is not None:
            _require_order(file, row, began_s)
        began_s = row.time_s if row.time_s is not None else ended_s + row.delay_s
        ids = np.concatenate([so_far, row.ids]) if deltas else row.ids
        request = _request(row, began_s, row.session, chains.runs(ids))
        requests.append(request)
        ended_s = began_s + request.duration_s
        if deltas:
            answer = row.output_tokens // block_tokens
            so_far = np.concatenate([ids, np.arange(own - answer, own, dtype=np.uint64)])
            own -= answer
    return requests


def _request(row: _Row, t_s: float, conversation: str, blocks: tuple[tuple[int, int], ...]) -> TracedRequest:
    took_s = answered_s(row.output_tokens)
    return TracedRequest(t_s, took_s, conversation, None, "root", None, row.output_tokens, blocks)


def _require_order(file: Path, row: _Row, before_s: float) -> None:
    assert row.time_s is not None
    if row.time_s < before_s:
        raise TraceError(file, row.line, f"rows by arrival, but {row.time_s} s comes after {before_s} s")


def _name(file: Path) -> str:
    return file.name.split(".")[0]
