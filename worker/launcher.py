"""The process that outlives a worker's ranks: starts them, notices death and silence, kills and starts again.

Imports no torch. Says on stdout, one JSON line each: listening, ready, restarting.
"""

from __future__ import annotations

import enum
import json
import signal
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType

import structlog

from worker.addresses import Address, Reservation
from worker.exits import ExitCode
from worker.rank_group import Ended, RankGroup, Said
from worker.settings import WorkerSettings

FAREWELL_S = 1.0
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_SILENCE_S = 30.0
STARTS_BEFORE_GIVING_UP = 3
STEADY_S = 60.0
STOP_MARGIN_S = 5.0
TICK_S = 0.5

log = structlog.get_logger()


class State(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True)
class Ending:
    """How one group ended. `recording`: the file that shows what led there, if there is one. `hopeless`: starting again
    cannot help; `ready_for_s` is None where it never was ready."""

    why: str
    recording: str = ""
    stopped: bool = False
    hopeless: bool = False
    ready_for_s: float | None = None


def launch(settings: WorkerSettings) -> ExitCode:
    """Run the worker until SIGTERM or SIGINT; a second signal does not wait for running requests."""
    try:
        grpc = Reservation(Address.parse(settings.listen.grpc))
        admin = Reservation(Address.parse(settings.listen.admin.address))
    except OSError as error:
        sys.stderr.write(
            f"The worker cannot listen on {settings.listen.grpc} and {settings.listen.admin.address}: "
            f"{error.strerror}. Choose others with listen.grpc and listen.admin.\n"
        )
        return ExitCode.ADDRESS_TAKEN
    administered = settings.listen.admin.model_copy(update={"address": str(admin.address)})
    listen = settings.listen.model_copy(update={"grpc": str(grpc.address), "admin": administered})
    launcher = Launcher(settings.model_copy(update={"listen": listen}))
    try:
        return launcher.run()
    finally:
        launcher.close()
        grpc.close()
        admin.close()


class Launcher:
    """STARTING --ready--> READY --signal--> DRAINING; any death or silence --> FAILED, killed, STARTING again."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._announced = False
        self._signals = 0
        self.mismatches = 0
        """Plans in which ranks decided differently, in all groups so far."""
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def run(self) -> ExitCode:
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        backoff_s, failed_starts = FIRST_BACKOFF_S, 0
        while True:
            group = RankGroup(self._settings, self.mismatches)
            group.watch(self._wake_read.fileno())
            try:
                ending = self.supervise(group)
            finally:
                group.kill()
            if ending.stopped:
                return ExitCode.STOPPED
            recorded = {"recording": ending.recording} if ending.recording else {}
            log.error("the ranks are ended", why=ending.why, **recorded)
            if ending.hopeless:
                return ExitCode.CONFIGURATION
            failed_starts = failed_starts + 1 if ending.ready_for_s is None else 0
            if failed_starts >= STARTS_BEFORE_GIVING_UP:
                return ExitCode.FAILED
            if ending.ready_for_s is not None and ending.ready_for_s > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            _say("restarting", why=ending.why, **recorded)
            if not self._pause(backoff_s):
                return ExitCode.STOPPED
            backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)

    def close(self) -> None:
        """After `run`, which hears of signals until its end."""
        signal.set_wakeup_fd(-1)
        self._wake_read.close()
        self._wake_write.close()

    def supervise(self, group: RankGroup) -> Ending:
        """Until the group has ended, or must be killed."""
        state, why, recording, hopeless = State.STARTING, "", "", False
        ready_since_s: float | None = None
        alive = set(group.heard_s)
        deadline_s = time.monotonic() + self._settings.group.start_timeout_s
        while True:
            for event in group.events(TICK_S):
                match event:
                    case Said(event="listening"):
                        self._announce_addresses()
                    case Said(event="ready") if state is State.STARTING:
                        state, ready_since_s, deadline_s = State.READY, time.monotonic(), float("inf")
                        _say("ready")
                    case Said(event="failed"):
                        why = why or str(event.members["why"])
                        self.mismatches = int(event.members.get("mismatches", self.mismatches))
                        recording = recording or str(event.members.get("recording", ""))
                    case Ended(rank=rank):
                        alive.discard(rank)
                        hopeless |= event.code == ExitCode.CONFIGURATION
                        if state is not State.DRAINING or event.code != 0:
                            why = why or str(event)
            self._drain_wakeups()
            why = why or self._silent(group, alive)
            now_s = time.monotonic()
            if self._signals > 1 or (self._signals and state in {State.STARTING, State.FAILED}):
                return Ending("told to stop", stopped=True)
            if self._signals and state is State.READY:
                state, deadline_s = State.DRAINING, now_s + self._settings.drain_timeout_s + STOP_MARGIN_S
                group.drain()
            if state is State.DRAINING:
                if not alive or why or now_s > deadline_s:
                    return Ending(why or "told to stop", stopped=True)
                continue
            if why and state is not State.FAILED:
                # Rank 0 may still tell its edges that their requests can be tried again.
                state, deadline_s = State.FAILED, now_s + FAREWELL_S
                group.kill(spare_leader=True)
            if now_s > deadline_s or (state is State.FAILED and 0 not in alive):
                return Ending(
                    why or f"not ready after {self._settings.group.start_timeout_s:.0f} s",
                    recording=recording,
                    hopeless=hopeless,
                    ready_for_s=None if ready_since_s is None else now_s - ready_since_s,
                )

    def _announce_addresses(self) -> None:
        """Once: they stay the same when the ranks are started again."""
        if not self._announced:
            self._announced = True
            listen = self._settings.listen
            _say("listening", grpc=listen.grpc, admin=listen.admin.address)

    def _silent(self, group: RankGroup, alive: set[int]) -> str:
        limit_s = time.monotonic() - LONGEST_SILENCE_S
        for rank in alive:
            if group.heard_s[rank] < limit_s:
                return f"rank {rank} has been silent for {LONGEST_SILENCE_S:.0f} s"
        return ""

    def _pause(self, seconds: float) -> bool:
        """Waits; False when told to stop."""
        end_s = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end_s:
            time.sleep(min(0.1, seconds))
        self._drain_wakeups()
        return not self._signals

    def _drain_wakeups(self) -> None:
        while True:
            try:
                if not self._wake_read.recv(64):
                    return
            except BlockingIOError:
                return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _say(event: str, **members: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **members}) + "\n")
    sys.stdout.flush()
