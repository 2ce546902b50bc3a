"""A trace file: recorded sessions, one JSON object a line, gzipped or plain. Prompts are block ids, not text.

Block ids are chained, so one id fixes everything in front of it: a prompt extends another if it has that one's last id
in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kinroute.replay.checks import fault_of
from kinroute.replay.faults import TraceError, told
from kinroute.replay.lines import lines_of

__all__ = ["Session", "TraceError", "TracedRequest", "parse", "read", "tokens_of"]
Int32s: TypeAlias = npt.NDArray[np.int32]
Kind: TypeAlias = Literal["root", "sub", "side"]
Stop: TypeAlias = Literal["tool", "end"]
MAX_TOKEN = 2**31
"""Token ids are below this."""


class TracedRequest(msgspec.Struct, frozen=True, rename={"t_s": "t", "duration_s": "dur"}):
    """`t_s`: arrival, from the session's start. `duration_s`: how long it took when it was recorded.

    `kind`: a root's turn, a sub-agent's, or a lone request (a title, a summary). `stop`: how the answer ended, None
    where unknown. `blocks`: the prompt, as (first id, count) of ids that follow each other.
    """

    t_s: float
    duration_s: float
    conversation: str
    parent: str | None
    kind: Kind
    stop: Stop | None
    output_tokens: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.blocks)

    def block(self, index: int) -> int | None:
        """The id of one block of the prompt; None behind its end."""
        for first, count in self.blocks:
            if index < count:
                return first + index
            index -= count
        return None

    def is_extended_by(self, later: TracedRequest) -> bool:
        last = self.num_blocks - 1
        return last < 0 or later.block(last) == self.block(last)


class Session(msgspec.Struct, frozen=True):
    """`requests` by arrival. Ids of conversations and blocks are unique within the session only."""

    session: str
    source: str
    block_tokens: int
    requests: tuple[TracedRequest, ...]

    @property
    def length_s(self) -> float:
        """Until the last answer's end."""
        return max((request.t_s + request.duration_s for request in self.requests), default=0.0)

    @property
    def block_bound(self) -> int:
        """Every block id is below it."""
        return max((first + count for request in self.requests for first, count in request.blocks), default=0)

    def with_gaps_cut(self, longest_s: float) -> Session:
        """The same requests, sooner: wherever nothing was running for longer than `longest_s`, for that long."""
        cut_s = busy_until_s = 0.0
        moved: list[TracedRequest] = []
        for request in self.requests:
            cut_s += max(0.0, request.t_s - busy_until_s - longest_s)
            busy_until_s = max(busy_until_s, request.t_s + request.duration_s)
            moved.append(msgspec.structs.replace(request, t_s=request.t_s - cut_s))
        return msgspec.structs.replace(self, requests=tuple(moved))


def read(path: Path) -> list[Session]:
    """Every session of a file. Raises OSError, or TraceError where it holds something else."""
    return list(parse(lines_of(path), path))


def parse(lines: Iterable[tuple[int, bytes]], file: Path) -> Iterator[Session]:
    """The sessions of numbered lines of `file`. Requests are decoded one by one and equal runs are one object, so a
    file of long sessions needs a few times its size. Raises TraceError.
    """
    runs: dict[tuple[int, int], tuple[int, int]] = {}
    for number, line in lines:
        try:
            head = _decode_head(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            raise TraceError(file, number, f"a session ({told(problem)})") from problem
        requests = tuple(_request(raw, index, file, number, runs) for index, raw in enumerate(head.requests))
        session = Session(head.session, head.source, head.block_tokens, requests)
        fault = fault_of(session)
        if fault is not None:
            raise TraceError(file, number, fault)
        yield session


class _Head(msgspec.Struct):
    session: str
    source: str
    block_tokens: int
    requests: list[msgspec.Raw]


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_request = msgspec.json.Decoder(TracedRequest).decode


def _request(
    raw: msgspec.Raw, index: int, file: Path, line: int, runs: dict[tuple[int, int], tuple[int, int]]
) -> TracedRequest:
    try:
        request = _decode_request(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise TraceError(file, line, f"a request of a session ({told(problem)}, in request {index + 1})") from problem
    return msgspec.structs.replace(request, blocks=tuple(runs.setdefault(run, run) for run in request.blocks))


def tokens_of(blocks: Sequence[tuple[int, int]], block_tokens: int, first_id: int = 0) -> Int32s:
    """The tokens of these blocks, the same for the same ids; `first_id` is added to each.

    Two ids have no token in common until the ids outgrow `MAX_TOKEN // block_tokens`, where they begin again.
    """
    most = MAX_TOKEN // block_tokens
    parts: list[Int32s] = []
    for first, count in blocks:
        start = (first + first_id) % most
        while count > 0:
            part = min(count, most - start)
            parts.append(np.arange(start * block_tokens, (start + part) * block_tokens, dtype=np.int32))
            count -= part
            start = 0
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
