"""How a worker's processes end, after sysexits.h, so that a supervisor can tell what to do."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Starting again helps after FAILED and nothing else."""

    STOPPED = 0
    ADDRESS_TAKEN = 69
    FAILED = 70
    CONFIGURATION = 78
