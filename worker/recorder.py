"""Rank 0's recording: each plan with its digest, from a checkpoint on, written by a thread of its own.

Serving neither waits for it nor fails with it. A disk that is too slow costs the rest of a segment; one that fails, or
is full, switches recording off.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import structlog

from worker.core import checkpoint
from worker.core.journal import DIGEST_BYTES
from worker.core.recording import FRAME, Failure, Framer, Header
from worker.core.replica import Replica
from worker.recording_ring import Ring, RingFull
from worker.telemetry import Metrics

MIN_PLANS = 512
"""Between two checkpoints, but where their plans are so big that they fill the segment."""
STEP_BYTES = FRAME.size + DIGEST_BYTES
QUEUE_BYTES = 32 << 20
CLOSE_DEADLINE_S = 5.0
FAILURE_DEADLINE_S = 0.5
"""The launcher gives rank 0 a second before it kills what is left of a group that failed."""

log = structlog.get_logger()


def open_recorder(folder: Path | None, max_bytes: int, header: Header, metrics: Metrics) -> Recorder | None:
    """None where recording is off, or, with a line in the log, where `folder` cannot hold it."""
    if not max_bytes:
        return None
    if folder is None:
        log.warning("nothing is recorded: set kv_cache_config.recording_dir, as there is no home folder")
        return None
    try:
        ring = Ring(folder, max_bytes)
    except OSError as error:
        log.error(
            "nothing is recorded: kv_cache_config.recording_dir cannot be used", folder=str(folder), why=str(error)
        )
        return None
    log.info("plans are recorded", folder=str(ring.folder), max_bytes=max_bytes)
    return Recorder(ring, header, metrics, max_bytes)


@dataclass(frozen=True, slots=True)
class _Begin:
    checkpoint: bytes


@dataclass(frozen=True, slots=True)
class _Step:
    plan: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class _End:
    failure: Failure | None


_Order: TypeAlias = _Begin | _Step | _End


class Recorder:
    """`start`, `record` and `rest` are the engine thread's; `fail` and `close` may come from any.

    A segment is a checkpoint and every plan behind it, without a gap. The next begins once there are `min_plans` and
    they take an eighth of the ring, or the segment three eighths; where one was cut short, once the writer has caught
    up. No segment takes more than half, so that the one before it stays until it is as long.
    """

    def __init__(
        self,
        ring: Ring,
        header: Header,
        metrics: Metrics,
        max_bytes: int,
        *,
        queue_bytes: int = QUEUE_BYTES,
        min_plans: int = MIN_PLANS,
    ) -> None:
        self._ring = ring
        self._header = header
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._queue_bytes = queue_bytes
        self._min_plans = min_plans
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        # Each of these two is changed by one thread alone; their difference is what is queued, but for a checkpoint.
        self._sent_bytes = self._taken_bytes = 0
        self._checkpoint_waits = False
        self._is_on = True
        self._ends = False
        self._drops = False
        self._plans = self._plan_bytes = self._checkpoint_bytes = 0
        self._failed_in: Path | None = None

    def start(self, replica: Replica) -> None:
        self._thread.start()
        self._metrics.recording_on.set(1)
        self._begin(replica)

    def record(self, plan: bytes, digest: bytes) -> None:
        """A plan was carried out. Costs some microseconds."""
        if self._ends:
            return
        num_bytes = STEP_BYTES + len(plan)
        self._plans += 1
        self._drops = self._drops or not self._is_on or not self._has_room(num_bytes)
        if self._drops:
            self._metrics.recording_dropped.inc()
            return
        self._plan_bytes += num_bytes
        self._sent_bytes += num_bytes
        self._orders.put(_Step(plan, digest))

    def rest(self, replica: Replica) -> None:
        """Between two plans: begins a segment where one is due, which costs a checkpoint (10 µs a run of blocks)."""
        if self._is_on and not self._ends and self._is_due():
            self._begin(replica)

    def fail(self, failure: Failure) -> Path | None:
        """The group ends: write why, and end. The file where that stands; None: it could not be written in time."""
        self._end(failure, FAILURE_DEADLINE_S)
        return self._failed_in

    def close(self) -> None:
        """Write what is queued, and end."""
        self._end(None, CLOSE_DEADLINE_S)

    def _has_room(self, num_bytes: int) -> bool:
        fits = 2 * (self._segment_bytes + num_bytes) <= self._max_bytes
        return fits and self._queued_bytes + num_bytes <= self._queue_bytes

    def _is_due(self) -> bool:
        is_full = 8 * self._segment_bytes >= 3 * self._max_bytes
        is_old = is_full or self._plans >= self._min_plans
        if self._checkpoint_waits:
            return False
        if self._drops:
            return is_old and self._queued_bytes == 0
        return is_old and 8 * self._plan_bytes >= self._max_bytes and 2 * self._queued_bytes <= self._queue_bytes

    @property
    def _segment_bytes(self) -> int:
        return self._checkpoint_bytes + self._plan_bytes

    @property
    def _queued_bytes(self) -> int:
        return self._sent_bytes - self._taken_bytes

    def _begin(self, replica: Replica) -> None:
        began_s = time.monotonic()
        saved = checkpoint.save(replica)
        if 4 * len(saved) > self._max_bytes:
            self._switch_off(
                f"kv_cache_config.recording_max_bytes is {self._max_bytes}: there must be room for four checkpoints, "
                f"and one takes {len(saved)} bytes"
            )
            return
        self._drops = False
        self._plans = self._plan_bytes = 0
        self._checkpoint_bytes = len(saved)
        self._checkpoint_waits = True
        self._orders.put(_Begin(saved))
        took_ms = round(1000 * (time.monotonic() - began_s), 1)
        log.debug("a checkpoint was taken", plan=replica.number, bytes=len(saved), took_ms=took_ms)

    def _end(self, failure: Failure | None, deadline_s: float) -> None:
        if not self._ends:
            self._ends = True
            self._orders.put(_End(failure))
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        self._metrics.recording_on.set(0)

    def _switch_off(self, why: str) -> None:
        if self._is_on:
            self._is_on = False
            self._metrics.recording_on.set(0)
            log.error("recording is switched off", why=why, folder=str(self._ring.folder))

    # The recorder's own thread.

    def _run(self) -> None:
        try:
            self._write()
        except (OSError, RingFull) as error:
            self._switch_off(str(error))
        except Exception as error:
            log.error("the recorder failed", exc_info=error)
            self._switch_off(repr(error))
        finally:
            with contextlib.suppress(OSError):
                self._ring.close()
            self._orders = queue.SimpleQueue()

    def _write(self) -> None:
        """Until told to end."""
        framer, path = Framer(), None
        while True:
            match order := self._orders.get():
                case _Begin():
                    framer = Framer()
                    path = self._ring.begin()
                    header = msgspec.structs.replace(self._header, began_at=_now())
                    self._ring.write(framer.begin(header, order.checkpoint))
                    self._checkpoint_waits = False
                case _Step():
                    self._ring.write(framer.step(order.plan, order.digest))
                    self._taken_bytes += STEP_BYTES + len(order.plan)
                case _End():
                    if order.failure is not None and path is not None:
                        self._write_failure(framer, order.failure)
                        self._failed_in = path
                    return

    def _write_failure(self, framer: Framer, failure: Failure) -> None:
        try:
            self._ring.write(copy.copy(framer).failure(failure))
        except RingFull:
            self._ring.write(framer.failure(msgspec.structs.replace(failure, ours=None, theirs=None)))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
