"""The rank processes of one start of a worker, as its launcher sees them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.place import SETTINGS, Place
from worker.settings import WorkerSettings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Said:
    """A rank's line to its launcher: `event` and its other members."""

    rank: int
    event: str
    members: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process is gone; `code` as of subprocess: negative is a signal."""

    rank: int
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} was ended by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} ended with code {self.code}"


class RankGroup:
    """Starts all ranks of this host. `events` tells what they say; nothing survives `kill`.

    Must be made on the main thread: the ranks ask the system to be killed when the thread that started them ends.
    """

    def __init__(self, settings: WorkerSettings, mismatches: int) -> None:
        """`mismatches`: those of the groups before."""
        self._selector = selectors.DefaultSelector()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._partial: dict[int, bytes] = {}
        self.heard_s: dict[int, float] = {}
        token = secrets.token_bytes(32)
        with socket.create_server((LOOPBACK, 0)) as control, socket.socket() as master:
            master.bind((LOOPBACK, 0))
            master_port = master.getsockname()[1]
            master.close()
            for rank in range(settings.tensor_parallel_size):
                status_read, status_write = os.pipe()
                place = Place(
                    rank=rank,
                    local_rank=rank,
                    world_size=settings.tensor_parallel_size,
                    local_world_size=settings.tensor_parallel_size,
                    master_addr=LOOPBACK,
                    master_port=master_port,
                    control_port=control.getsockname()[1],
                    token=token,
                    control_fd=control.fileno() if rank == 0 else None,
                    status_fd=status_write,
                    launcher_pid=os.getpid(),
                    mismatches=mismatches,
                )
                self._spawn(place, settings, status_read)

    def _spawn(self, place: Place, settings: WorkerSettings, status_read: int) -> None:
        assert place.status_fd is not None
        threads = str(settings.rank_threads)
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.rank"],
            stdin=subprocess.PIPE if place.rank == 0 else subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=os.environ
            | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, SETTINGS: settings.model_dump_json()}
            | place.to_environment(),
            pass_fds=[fd for fd in (place.status_fd, place.control_fd) if fd is not None],
        )
        os.close(place.status_fd)
        os.set_blocking(status_read, False)
        self._processes.append(process)
        self._partial[place.rank] = b""
        # Until its first word it imports what it needs, which takes as long as the machine lets it.
        self.heard_s[place.rank] = math.inf
        self._selector.register(status_read, selectors.EVENT_READ, ("status", place.rank))
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, ("process", place.rank))

    def watch(self, fd: int) -> None:
        """End a wait in `events` when `fd` becomes readable, too."""
        self._selector.register(fd, selectors.EVENT_READ, ("other", -1))

    def events(self, timeout_s: float) -> Iterator[Said | Ended]:
        """What happened within `timeout_s`; returns early when something did."""
        for key, _ in self._selector.select(timeout_s):
            what, rank = key.data
            if what == "status":
                yield from self._read(key.fd, rank)
            elif what == "process":
                for other in list(self._selector.get_map().values()):
                    if other.data == ("status", rank):
                        yield from self._read(other.fd, rank)
                self._forget(key.fd)
                yield Ended(rank, self._processes[rank].wait())

    def drain(self) -> None:
        """Ask rank 0 to finish what runs, and all to end."""
        self._tell_leader(b"drain\n")

    def kill(self, *, spare_leader: bool = False) -> None:
        """SIGKILL to every rank that lives (but rank 0 if told so); returns when they are gone."""
        for process in self._processes[spare_leader:]:
            process.kill()
        for process in self._processes[spare_leader:]:
            process.wait()
        if spare_leader:
            return
        for left in Path("/dev/shm").glob(f"kinroute-{os.getpid()}-*"):  # noqa: S108 - named in worker.loading
            left.unlink(missing_ok=True)
        for key in list(self._selector.get_map().values()):
            if key.data[0] == "other":
                self._selector.unregister(key.fd)
            else:
                self._forget(key.fd)
        self._selector.close()
        leader = self._processes[0].stdin
        if leader is not None:
            with contextlib.suppress(OSError):
                leader.close()

    def _tell_leader(self, line: bytes) -> None:
        leader = self._processes[0].stdin
        assert leader is not None
        with contextlib.suppress(OSError):
            leader.write(line)
            leader.flush()

    def _read(self, fd: int, rank: int) -> Iterator[Said]:
        while True:
            try:
                part = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not part:
                self._forget(fd)
                return
            self.heard_s[rank] = time.monotonic()
            *lines, self._partial[rank] = (self._partial[rank] + part).split(b"\n")
            for line in lines:
                members = json.loads(line)
                yield Said(rank, members.pop("event"), members)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
