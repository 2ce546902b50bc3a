"""A worker's entry: our launcher and its ranks, or, where torchrun started this process, one rank."""

from __future__ import annotations

import os
import sys

import structlog

from configuration.reading import SettingsError
from worker.certificates import require_certificates
from worker.exits import ExitCode
from worker.launcher import launch
from worker.settings import WorkerSettings
from worker.telemetry import configure_logs

log = structlog.get_logger()


def run_worker(settings: WorkerSettings) -> int:
    """Returns an `ExitCode` once told to stop, or when going on cannot help."""
    configure_logs(settings.log, model=settings.model_name, role=settings.role)
    for warning in settings.warnings:
        log.warning(warning)
    try:
        require_certificates(settings)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIGURATION
    if "RANK" not in os.environ:
        return launch(settings)
    # Here, and only in a rank: it imports torch.
    from worker.place import Place
    from worker.rank import run_rank

    try:
        place = Place.from_environment(settings)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIGURATION
    return run_rank(settings, place)
