"""The entry of one rank: `python -m worker.rank`, started by our launcher, or `run_rank` under torchrun."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

from configuration.reading import SettingsError
from worker.exits import ExitCode
from worker.place import SETTINGS, TOKEN, Place
from worker.settings import WorkerSettings
from worker.status import Status
from worker.telemetry import configure_logs

if TYPE_CHECKING:
    from worker.follower_rank import FollowerRank
    from worker.leader_rank import LeaderRank

PR_SET_PDEATHSIG = 1


def main() -> ExitCode:
    settings = WorkerSettings.model_validate_json(os.environ[SETTINGS])
    try:
        place = Place.from_environment(settings)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIGURATION
    os.environ.pop(TOKEN, None)
    if place.launcher_pid is not None:
        _die_with(place.launcher_pid)
    configure_logs(settings.log, model=settings.model_name, role=settings.role, rank=place.rank)
    return run_rank(settings, place)


def run_rank(settings: WorkerSettings, place: Place) -> ExitCode:
    """Until the group ends. A group that fails ends this process at once, whatever its threads are stuck in."""
    leader, follower = _classes()
    status = Status(place.status_fd)
    status.start_beating()
    if place.launcher_pid is not None:
        # A terminal's Ctrl-C reaches the whole process group; the launcher alone decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = (leader if place.rank == 0 else follower)(settings, place, status)
    try:
        code = rank.run()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        code = ExitCode.CONFIGURATION
    sys.stderr.flush()
    if code is not ExitCode.STOPPED:
        os._exit(code)
    return code


def _classes() -> tuple[type[LeaderRank], type[FollowerRank]]:
    """Imports torch and transformers. It all stays: to search it for garbage as it grows takes a third more time."""
    gc.disable()
    from worker.follower_rank import FollowerRank
    from worker.leader_rank import LeaderRank

    gc.freeze()
    gc.enable()
    return LeaderRank, FollowerRank


def _die_with(launcher_pid: int) -> None:
    """Ask the system for SIGKILL when the launcher is gone, however it went."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(ExitCode.FAILED)


if __name__ == "__main__":
    sys.exit(main())
