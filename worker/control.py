"""The control channel of a group: plans from rank 0 out, what each rank did back.

Rank 0's `Leader` reads it in a thread of its own, which no collective blocks: that thread compares the ranks' digests,
watches deadlines, and is the one that gives a group up.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec

from worker.agreement import Agreement, Differs
from worker.channel import Channel, ChannelError, Kind, admit, join
from worker.core.recording import Failure
from worker.core.tiers import CopyEnded

REPORT = struct.Struct("<Q")
TICK_S = 0.25
EXPLAIN_DEADLINE_S = 2.0
JOIN_RETRY_S = 0.1

Decisions = Callable[[], Iterable[tuple[object, ...]]]
"""A rank's last decisions, oldest first."""


class Facts(msgspec.Struct, frozen=True):
    """What a rank knows after loading: how many pages of each tier its memory, and its share of theirs, can hold."""

    max_pages: int
    max_host_pages: int = 0
    max_disk_pages: int = 0


class Setup(msgspec.Struct, frozen=True):
    """What rank 0 made of all ranks' facts: the pages of each tier, the same on every rank."""

    num_pages: int
    num_host_pages: int = 0
    num_disk_pages: int = 0

    @classmethod
    def agreed(cls, facts: Collection[Facts]) -> Self:
        """The least of what the ranks can hold, tier by tier."""
        return cls(
            num_pages=min(fact.max_pages for fact in facts),
            num_host_pages=min(fact.max_host_pages for fact in facts),
            num_disk_pages=min(fact.max_disk_pages for fact in facts),
        )


class Pulled(msgspec.Struct, frozen=True):
    """One rank's part of a pull is over; `why` is None where its pages arrived."""

    request: int
    why: str | None


class LeaderEvents(Protocol):
    """Called on the control thread, or by `Leader.applied` on the engine thread; never two at once."""

    def agreed(self, number: int) -> None: ...
    def pulled(self, rank: int, pulled: Pulled) -> None: ...
    def copied(self, rank: int, ended: CopyEnded) -> None: ...
    def checked(self, rank: int, answer: bytes) -> None: ...
    def failed(self, failure: Failure) -> None: ...


def gather(
    listener: socket.socket, token: bytes, group_nonce: bytes, world_size: int, deadline_s: float
) -> dict[int, Channel]:
    """The channels of ranks 1 to `world_size` - 1, once all joined. Raises TimeoutError after `deadline_s`."""
    channels: dict[int, Channel] = {}
    end_s = time.monotonic() + deadline_s
    while len(channels) < world_size - 1:
        listener.settimeout(max(0.0, end_s - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except (TimeoutError, BlockingIOError):
            missing = sorted(set(range(1, world_size)) - channels.keys())
            raise TimeoutError(f"ranks {missing} did not join in {deadline_s:.0f} s") from None
        connection.settimeout(5.0)
        try:
            rank, channel = admit(connection, token, group_nonce)
        except (ChannelError, OSError):
            connection.close()
            continue
        if rank in channels or not 0 < rank < world_size:
            raise ChannelError(f"rank {rank} joined twice, or is none of this group of {world_size}")
        channel.set_deadline(deadline_s)
        channels[rank] = channel
    return channels


def connect(address: tuple[str, int], token: bytes, rank: int, deadline_s: float) -> tuple[bytes, Channel]:
    """A follower's channel to rank 0, which may still be starting. Raises TimeoutError, ChannelError."""
    end_s = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=5.0)
            try:
                nonce, channel = join(connection, token, rank)
            except (ChannelError, OSError):
                connection.close()
                raise
            channel.set_deadline(None)
            return nonce, channel
        if time.monotonic() > end_s:
            raise TimeoutError(f"rank 0 was not reached at {address[0]}:{address[1]} in {deadline_s:.0f} s")
        time.sleep(JOIN_RETRY_S)


@dataclass(slots=True)
class _Sent:
    number: int
    at_s: float


class Leader:
    """Rank 0's end. `send_plan` and `applied` are the engine thread's; the rest runs in the thread that `start` begins.

    `overdue` says why this rank's own engine is stuck, or None. After `failed` nothing more is reported.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        events: LeaderEvents,
        *,
        decisions: Decisions,
        overdue: Callable[[], str | None],
        report_timeout_s: float,
    ) -> None:
        self._channels = dict(channels)
        self._events = events
        self._decisions = decisions
        self._overdue = overdue
        self._report_timeout_s = report_timeout_s
        self._agreement = Agreement(1 + len(channels))
        self._differs: Differs | None = None
        self._unreported: dict[int, deque[_Sent]] = {rank: deque() for rank in channels}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        for channel in self._channels.values():
            channel.set_deadline(self._report_timeout_s)
        self._thread.start()

    def send_plan(self, number: int, encoded: bytes) -> None:
        """To every follower, before rank 0 applies it."""
        now_s = time.monotonic()
        for rank, channel in self._channels.items():
            self._unreported[rank].append(_Sent(number, now_s))
            channel.send(Kind.PLAN, encoded)

    def applied(self, number: int, digest: bytes) -> None:
        """Rank 0's own report of a plan. If it differs, the control thread says so: the caller may go on meanwhile."""
        self._feed(0, number, digest)

    def ask_check(self) -> None:
        """Every follower answers with `checked`, after the plans sent so far."""
        for channel in self._channels.values():
            channel.send(Kind.CHECK)

    def stop(self) -> None:
        """Tell the followers to end, and stop listening to them."""
        self._stopping.set()
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(Kind.STOP)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        for channel in self._channels.values():
            channel.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while not self._stopping.is_set():
                try:
                    failure = self._round(selector)
                except Exception as error:  # noqa: BLE001 - the outermost loop: whatever it is, the group must end
                    failure = Failure(f"the control thread failed: {error!r}")
                if failure is not None and not self._stopping.is_set():
                    self._stopping.set()
                    self._events.failed(failure)

    def _round(self, selector: selectors.BaseSelector) -> Failure | None:
        """Reads what came; returns why the group must end, or None."""
        why = self._read(selector)
        if why is None and self._differs is not None:
            return self._difference(self._differs)
        why = why or self._late() or self._overdue()
        return Failure(why) if why is not None else None

    def _read(self, selector: selectors.BaseSelector) -> str | None:
        if self._channels:
            ready = selector.select(TICK_S)
        else:
            self._stopping.wait(TICK_S)
            ready = []
        for key, _ in ready:
            rank: int = key.data
            try:
                frame = self._channels[rank].receive()
            except (OSError, ChannelError, ValueError) as error:
                return f"rank {rank} is lost: {error}"
            if frame is None:
                return f"rank {rank} is gone"
            why = self._take(rank, *frame)
            if why is not None:
                return why
        return None

    def _take(self, rank: int, kind: Kind, payload: bytes) -> str | None:
        match kind:
            case Kind.REPORT:
                (number,) = REPORT.unpack_from(payload)
                self._unreported[rank].popleft()
                self._feed(rank, number, payload[REPORT.size :])
            case Kind.PULLED:
                with self._lock:
                    self._events.pulled(rank, msgspec.msgpack.decode(payload, type=Pulled))
            case Kind.COPIED:
                with self._lock:
                    self._events.copied(rank, CopyEnded(*msgspec.msgpack.decode(payload, type=tuple[int, int, str])))
            case Kind.CHECKED:
                with self._lock:
                    self._events.checked(rank, payload)
            case Kind.FAILED:
                return f"rank {rank} failed: {payload.decode(errors='replace')}"
            case _:
                return f"rank {rank} sent {kind.name}, which is not a follower's to send"
        return None

    def _feed(self, rank: int, number: int, digest: bytes) -> None:
        with self._lock:
            before = self._agreement.agreed
            self._differs = self._agreement.feed(rank, number, digest)
            if self._agreement.agreed != before:
                self._events.agreed(self._agreement.agreed)

    def _late(self) -> str | None:
        limit_s = time.monotonic() - self._report_timeout_s
        for rank, sent in self._unreported.items():
            if sent and sent[0].at_s < limit_s:
                return f"rank {rank} has not reported plan {sent[0].number} in {self._report_timeout_s:.0f} s"
        return None

    def _difference(self, differs: Differs) -> Failure:
        """Names the first decision in which a rank left rank 0."""
        rank, number = differs.rank, differs.number
        channel = self._channels[rank]
        ours = _of_plan(_portable(self._decisions()), number)
        theirs: list[list[object]] | None = None
        with contextlib.suppress(OSError, ChannelError, ValueError):
            channel.set_deadline(EXPLAIN_DEADLINE_S)
            channel.send(Kind.EXPLAIN)
            while theirs is None and (frame := channel.receive()) is not None:
                if frame[0] is Kind.EXPLAINED:
                    theirs = _of_plan(msgspec.msgpack.decode(frame[1], type=list[list[object]]), number)
        head = f"rank {rank} decided otherwise than rank 0 in plan {number}"
        return Failure(f"{head}{_how(ours, rank, theirs)}", plan=number, rank=rank, ours=ours, theirs=theirs)


def _how(ours: list[list[object]], rank: int, theirs: list[list[object]] | None) -> str:
    """The first decision that differs, in a sentence that says already who and when."""
    if theirs is None:
        return "; it did not say how"
    for own, other in itertools.zip_longest(ours, theirs):
        if own != other:
            return f": rank 0 {own}, rank {rank} {other}"
    return ", in what is no longer kept"


def _of_plan(decisions: list[list[object]], number: int) -> list[list[object]]:
    """Those of plan `number`: a decision's first member is its plan's number, and one end may be further on."""
    return [one for one in decisions if one[0] == number]


def _portable(decisions: Iterable[tuple[object, ...]]) -> list[list[object]]:
    """As they look after a journey over the channel."""
    portable: list[list[object]] = msgspec.to_builtins([list(decision) for decision in decisions], enc_hook=str)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(portable), type=list[list[object]])


class Follower:
    """Another rank's end. `run` reads until the group ends; the other calls may come from any thread."""

    def __init__(self, channel: Channel, decisions: Decisions) -> None:
        self._channel = channel
        self._decisions = decisions

    def report(self, number: int, digest: bytes) -> None:
        self._channel.send(Kind.REPORT, REPORT.pack(number) + digest)

    def pulled(self, pulled: Pulled) -> None:
        # If rank 0 is gone, `run` ends this rank.
        with contextlib.suppress(OSError):
            self._channel.send(Kind.PULLED, msgspec.msgpack.encode(pulled))

    def copied(self, ended: CopyEnded) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(Kind.COPIED, msgspec.msgpack.encode((ended.number, ended.good, ended.why)))

    def checked(self, answer: bytes) -> None:
        self._channel.send(Kind.CHECKED, answer)

    def failed(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(Kind.FAILED, why.encode())

    def run(self, engine: queue.SimpleQueue[tuple[Kind, bytes]]) -> None:
        """Hands PLAN, CHECK and STOP to `engine`, in order; returns after STOP.

        Raises ChannelError when rank 0 is gone.
        """
        while True:
            try:
                frame = self._channel.receive()
            except OSError:
                frame = None
            if frame is None:
                raise ChannelError("rank 0 is gone")
            if frame[0] is Kind.EXPLAIN:
                self._channel.send(Kind.EXPLAINED, msgspec.msgpack.encode(_portable(self._decisions())))
                continue
            engine.put(frame)
            if frame[0] is Kind.STOP:
                return
