"""Records a load into the folder that it is given while no file may grow beyond 200,000 bytes, and says how that went.

A process of its own: the limit holds for all that a process writes. It stands for a disk that is full.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path

from structlog.testing import capture_logs

from tests.worker.core.families import Families
from tests.worker.recorders import TOTAL, make_recorder
from worker.core.recording import Failure
from worker.telemetry import Metrics

MAX_FILE_BYTES = 200_000
STEPS = 2000


def main() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    metrics = Metrics()
    families = Families(random.Random(5))
    with capture_logs() as logs:
        recorder = make_recorder(Path(sys.argv[1]), families.replica, max_bytes=8 << 20, metrics=metrics)
        for plan in families.steps(STEPS):
            recorder.record(plan, families.replica.digest)
            recorder.rest(families.replica)
        failed_in = recorder.fail(Failure("the test is over"))
    said = {
        "steps": families.replica.number,
        "on": metrics.registry.get_sample_value("kinroute_worker_recording_on"),
        "dropped": metrics.registry.get_sample_value(TOTAL),
        "failed_in": failed_in,
        "errors": [line["why"] for line in logs if line["log_level"] == "error"],
    }
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
