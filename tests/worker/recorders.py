"""Recorders for tests, started, with a worker that does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker.core.recording import Header
from worker.core.replica import Replica
from worker.recorder import Recorder
from worker.recording_ring import Ring
from worker.telemetry import Metrics

TOTAL = "kinroute_worker_recording_dropped_plans_total"


def header_of(replica: Replica) -> Header:
    return Header(replica.config, "tiny", "context", world_size=2, rank=0, instance_id="one", release="0.1.0")


def make_recorder(
    folder: Path, replica: Replica, *, max_bytes: int, metrics: Metrics | None = None, **members: Any
) -> Recorder:
    """`members`: more of Recorder's."""
    ring = Ring(folder, max_bytes)
    recorder = Recorder(ring, header_of(replica), metrics or Metrics(), max_bytes, **members)
    recorder.start(replica)
    return recorder
