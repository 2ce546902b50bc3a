"""A segment of a recording as bytes: whose it is, a checkpoint, and each plan behind that with its digest.

    magic, version
    HEADER      whose recording this is, and its manager's configuration
    CHECKPOINT  the manager between two plans (worker.core.checkpoint)
    STEP ...    a plan, and the digest after it
    FAILURE     why the group ended, where it did

Each record has a frame: kind, length, checksum, and a checksum of these. A record's checksum covers the one before it,
so none can be lost, repeated or moved. A segment that ends inside a record is torn: its writer was ended there, and
what stands before it counts. Anything else that is not as it was written is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from worker.core import plan as plans
from worker.core.config import CacheConfig
from worker.core.journal import DIGEST_BYTES
from worker.core.plan import Plan

MAGIC = b"KINROUTE-REC"
VERSION = 2
FRAME = struct.Struct("<BIII")
PREFIX = struct.Struct("<BII")
START = len(MAGIC) + 4

T = TypeVar("T")


class Kind(enum.IntEnum):
    HEADER = 1
    CHECKPOINT = 2
    STEP = 3
    FAILURE = 4


class RecordingError(Exception):
    """Raised when bytes are no segment that can be replayed: at which offset, and what was due there."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(f"at offset {offset}: {message}")
        self.offset = offset


class Unfinished(RecordingError):
    """Raised when a segment ends before its checkpoint does: its writer was ended there."""


class Header(msgspec.Struct, frozen=True):
    """Whose recording this is. `release`: of the program that wrote it. `began_at`: ISO 8601, UTC."""

    config: CacheConfig
    model: str
    role: str
    world_size: int
    rank: int
    instance_id: str
    release: str
    began_at: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a group ended. `plan`, `rank`: in which plan which rank decided otherwise than rank 0; None: it ended for
    another reason. `ours`, `theirs`: rank 0's and that rank's decisions of the plan, as `Decision.portable` has them;
    None: not told."""

    why: str
    plan: int | None = None
    rank: int | None = None
    ours: list[list[Any]] | None = None
    theirs: list[list[Any]] | None = None


class Step(NamedTuple):
    plan: Plan
    digest: bytes


class Framer:
    """Frames the records of one segment, which must be written in the order of the calls."""

    def __init__(self) -> None:
        self._sum = 0

    def begin(self, header: Header, checkpoint: bytes) -> list[bytes]:
        start = MAGIC + struct.pack("<I", VERSION)
        return [
            start,
            *self._frame(Kind.HEADER, msgspec.msgpack.encode(header)),
            *self._frame(Kind.CHECKPOINT, checkpoint),
        ]

    def step(self, plan: bytes, digest: bytes) -> list[bytes]:
        assert len(digest) == DIGEST_BYTES, f"a digest of {len(digest)} bytes"
        return self._frame(Kind.STEP, digest + plan)

    def failure(self, failure: Failure) -> list[bytes]:
        return self._frame(Kind.FAILURE, msgspec.msgpack.encode(failure))

    def _frame(self, kind: Kind, record: bytes) -> list[bytes]:
        self._sum = zlib.crc32(record, self._sum)
        prefix = PREFIX.pack(kind, len(record), self._sum)
        return [prefix + struct.pack("<I", zlib.crc32(prefix)), record]


@dataclass(frozen=True, slots=True)
class Segment:
    """`torn_at`: where the record begins that its end cut off; None: it ends with a whole one."""

    header: Header
    checkpoint: memoryview
    failure: Failure | None
    torn_at: int | None
    _steps: list[tuple[int, memoryview]]

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def steps(self) -> Iterator[Step]:
        """In their order. Raises RecordingError where a plan cannot be read, or is not the next."""
        last: int | None = None
        for offset, record in self._steps:
            try:
                plan = plans.decode(bytes(record[DIGEST_BYTES:]))
            except msgspec.MsgspecError as error:
                raise RecordingError(offset, f"a plan was due: {error}") from error
            if last is not None and plan.number != last + 1:
                raise RecordingError(offset, f"plan {last + 1} was due, not plan {plan.number}")
            last = plan.number
            yield Step(plan, bytes(record[:DIGEST_BYTES]))


def read(data: bytes) -> Segment:
    """Raises RecordingError; Unfinished where even the checkpoint is torn. The segment keeps `data`."""
    _require_start(data)
    header: Header | None = None
    checkpoint: memoryview | None = None
    failure: Failure | None = None
    steps: list[tuple[int, memoryview]] = []
    end = START
    for offset, kind, record in _records(data):
        due = Kind.HEADER if header is None else Kind.CHECKPOINT if checkpoint is None else Kind.STEP
        if failure is not None:
            raise RecordingError(offset, f"the end was due behind a failure, not {kind.name}")
        if kind is not due and not (due is Kind.STEP and kind is Kind.FAILURE):
            raise RecordingError(offset, f"{due.name} was due, not {kind.name}")
        match kind:
            case Kind.HEADER:
                header = _header(offset, record)
            case Kind.CHECKPOINT:
                checkpoint = record
            case Kind.STEP:
                if len(record) < DIGEST_BYTES:
                    raise RecordingError(offset, "a digest and a plan were due, not so few bytes")
                steps.append((offset, record))
            case Kind.FAILURE:
                failure = _decoded(offset, record, Failure)
        end = offset + FRAME.size + len(record)
    if header is None or checkpoint is None:
        raise Unfinished(end, "it ends where the rest of its checkpoint was due")
    return Segment(header, checkpoint, failure, None if end == len(data) else end, steps)


def _require_start(data: bytes) -> None:
    magic = data[: len(MAGIC)]
    if not MAGIC.startswith(magic):
        raise RecordingError(0, f"{MAGIC.decode()} was due: this is no recording of Kinroute's")
    if len(data) < START:
        raise Unfinished(len(data), "it ends inside its first bytes")
    (version,) = struct.unpack_from("<I", data, len(MAGIC))
    if version != VERSION:
        raise RecordingError(len(MAGIC), f"version {VERSION} was due, not {version}: use the release that recorded it")


def _records(data: bytes) -> Iterator[tuple[int, Kind, memoryview]]:
    """Offset, kind and content of each whole record."""
    view = memoryview(data)
    offset, chained = START, 0
    while len(data) - offset >= FRAME.size:
        kind, length, checksum, own = FRAME.unpack_from(data, offset)
        if zlib.crc32(view[offset : offset + PREFIX.size]) != own:
            raise RecordingError(offset, "a record was due: its frame is damaged")
        start = offset + FRAME.size
        if len(data) - start < length:
            return
        record = view[start : start + length]
        chained = zlib.crc32(record, chained)
        if chained != checksum:
            raise RecordingError(offset, f"a record of {length} bytes was due: it is damaged, or one before it is gone")
        try:
            known = Kind(kind)
        except ValueError:
            raise RecordingError(offset, f"a known kind of record was due, not {kind}") from None
        yield offset, known, record
        offset = start + length


def _header(offset: int, record: memoryview) -> Header:
    raw = _decoded(offset, record, dict[str, Any])
    wanted = {field.name for field in dataclasses.fields(CacheConfig)}
    given = raw.get("config")
    if not isinstance(given, dict) or given.keys() != wanted:
        raise RecordingError(offset, "another configuration was due: use the release that recorded it")
    return _decoded(offset, record, Header)


def _decoded(offset: int, record: memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(record, type=kind)
    except msgspec.MsgspecError as error:
        raise RecordingError(offset, f"{kind.__name__} was due: {error}") from error
