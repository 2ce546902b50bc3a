"""kv-cache-tester's session files: one JSON object with `id`, `block_size` and `requests`, sub-agents nested in them.

A sub-agent's entry says when it ended if it is `completed` (its beginning is `duration_ms` earlier), and when it was
launched otherwise; times inside it count from its beginning. A file is one session; its sub-agents with one `agent_id`
are one conversation. Prompts without `hash_ids` have blocks of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kinroute.replay.chains import Chains
from kinroute.replay.checks import fault_of
from kinroute.replay.faults import TraceError, told
from kinroute.replay.timing import answered_s
from kinroute.replay.traces import Kind, Session, Stop, TracedRequest

SOURCE = "kv-cache-tester"
ROOT = "root"
MAX_DEPTH = 32
STOPS: dict[str, Stop] = {"tool_use": "tool", "end_turn": "end"}
ROUNDING_S = 1.0
"""Times in these files are rounded, to a second at most."""


class _File(msgspec.Struct):
    id: str
    block_size: int
    requests: list[msgspec.Raw]


class _Type(msgspec.Struct):
    type: str


class _Call(msgspec.Struct, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    t: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int] = []
    stop: str | None = None
    api_time: float | None = None


class _SubAgent(msgspec.Struct):
    t: float
    agent_id: str
    status: str
    requests: list[msgspec.Raw]
    duration_ms: float | None = None


_decode_file = msgspec.json.Decoder(_File).decode
_decode_type = msgspec.json.Decoder(_Type).decode
_decode_call = msgspec.json.Decoder(_Call).decode
_decode_sub_agent = msgspec.json.Decoder(_SubAgent).decode


def parse(text: bytes, file: Path, line: int = 1) -> Session:
    """The session of one file's text, which begins in `line`. Raises TraceError."""
    return _Reading(text, file, line).session()


class _Reading:
    def __init__(self, text: bytes, file: Path, line: int) -> None:
        self._text = text
        self._file = file
        self._first_line = line
        self._at = 0
        """Where the entry begins that is read now."""
        self._chains = Chains()
        self._block_tokens = 0

    def session(self) -> Session:
        try:
            head = _decode_file(self._text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            raise TraceError(self._file, self._line_of(problem), f"a session ({told(problem)})") from problem
        if head.block_size < 1:
            raise TraceError(self._file, self._first_line, f"a block_size from 1 on, not {head.block_size}")
        self._block_tokens = head.block_size
        calls = sorted(self._calls(head.requests, ROOT, None, 0.0, 0), key=lambda call: call.t_s)
        session = Session(head.id, SOURCE, head.block_size, tuple(calls))
        fault = fault_of(session)
        if fault is not None:
            raise TraceError(self._file, self._first_line, fault)
        return session

    def _calls(
        self, entries: list[msgspec.Raw], conversation: str, parent: str | None, began_s: float, depth: int
    ) -> Iterator[TracedRequest]:
        """`began_s`: from where their times count."""
        if depth > MAX_DEPTH:
            raise self._fault(f"sub-agents at most {MAX_DEPTH} deep")
        before_s = 0.0
        for raw in entries:
            self._at = max(self._at, self._text.find(bytes(raw), self._at))
            try:
                is_sub_agent = _decode_type(raw).type == "subagent"
                entry = _decode_sub_agent(raw) if is_sub_agent else _decode_call(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
                raise self._fault(f"a request or a sub-agent ({told(problem)})") from problem
            if not 0 <= entry.t < float("inf"):
                raise self._fault(f"a time from 0 on, not {entry.t}")
            if isinstance(entry, _SubAgent):
                name = entry.agent_id if conversation == ROOT else f"{conversation}/{entry.agent_id}"
                began = began_s + max(0.0, self._began_s(entry))
                yield from self._calls(entry.requests, name, conversation, began, depth + 1)
                continue
            if entry.t < before_s:
                raise self._fault(f"requests by arrival, but {entry.t} s comes after {before_s} s")
            before_s = entry.t
            yield self._call(entry, conversation, parent, began_s + entry.t)

    def _began_s(self, entry: _SubAgent) -> float:
        if entry.status != "completed" or entry.duration_ms is None:
            return entry.t
        began_s = entry.t - entry.duration_ms / 1000
        if entry.duration_ms < 0 or not began_s >= -ROUNDING_S:
            raise self._fault(f"a duration that fits its end at {entry.t} s, not {entry.duration_ms} ms")
        return began_s

    def _call(self, call: _Call, conversation: str, parent: str | None, t_s: float) -> TracedRequest:
        if call.prompt_tokens < 0 or call.output_tokens < 0:
            raise self._fault(f"lengths from 0 on, not {call.prompt_tokens} and {call.output_tokens}")
        if call.api_time is not None and not 0 <= call.api_time < float("inf"):
            raise self._fault(f"an api_time from 0 on, not {call.api_time}")
        if not all(0 <= block < 2**64 for block in call.hash_ids):
            raise self._fault("hash_ids from 0 on, of 64 bits")
        chains = self._chains
        blocks = chains.runs(call.hash_ids) or chains.fresh(call.prompt_tokens // self._block_tokens)
        duration_s = call.api_time if call.api_time is not None else answered_s(call.output_tokens)
        kind: Kind = "root" if parent is None else "sub"
        stop = STOPS.get(call.stop or "")
        return TracedRequest(t_s, duration_s, conversation, parent, kind, stop, call.output_tokens, blocks)

    def _fault(self, expected: str) -> TraceError:
        return TraceError(self._file, self._first_line + self._text.count(b"\n", 0, self._at), expected)

    def _line_of(self, problem: Exception) -> int:
        """A decoder that cannot go on says at which byte."""
        _, _, at = str(problem).rpartition("(byte ")
        end = at.removesuffix(")")
        return self._first_line + (self._text.count(b"\n", 0, int(end)) if end.isdecimal() else 0)
