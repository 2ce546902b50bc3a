"""The files of a worker's recordings: segments in a folder of its own, of which the oldest are deleted in time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_SLOTS = 64
MAX_SEGMENTS = 256
NAME = re.compile(r"segment-(\d{6,18})\.kinrec", re.ASCII)
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY
FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class _File:
    number: int
    size: int


class RingFull(Exception):
    """Raised when something cannot be written within the ring's bound, even with all older segments gone."""


class Ring:
    """Segments in the first subfolder `0`, `1` ... of a folder that no other worker has taken. Used by one thread.

    They outlive a worker: the next one that takes the subfolder goes on where it ended. All together never take more
    than `max_bytes`. Folder 0700, files 0600; where a link stands in place of either, it is not followed.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises OSError."""
        self._max_bytes = max_bytes
        self._fd = -1
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        slot, self._folder_fd = _take_slot(folder)
        self.folder = folder / slot
        self._files = deque(_segments(self._folder_fd))
        self._number = self._files[-1].number if self._files else 0
        self._size = 0
        self.total = sum(file.size for file in self._files)
        """Bytes of all segments."""
        self._make_room(0)

    def begin(self) -> Path:
        """A new segment, behind all others. Raises OSError."""
        self._end_segment()
        self._number += 1
        name = _name(self._number)
        self._fd = os.open(name, FILE_FLAGS, 0o600, dir_fd=self._folder_fd)
        self._make_room(0)
        return self.folder / name

    def write(self, parts: Sequence[bytes]) -> None:
        """Add to the segment that was begun last. Raises OSError, RingFull."""
        self._make_room(sum(map(len, parts)))
        for part in parts:
            left = memoryview(part)
            while left:
                written = os.write(self._fd, left)
                self._size += written
                self.total += written
                left = left[written:]

    def close(self) -> None:
        """The folder is free for another worker; the segments stay."""
        self._end_segment()
        os.close(self._folder_fd)

    def _end_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._files.append(_File(self._number, self._size))
            self._fd, self._size = -1, 0

    def _make_room(self, num_bytes: int) -> None:
        while self._files and (self.total + num_bytes > self._max_bytes or len(self._files) >= MAX_SEGMENTS):
            oldest = self._files.popleft()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_name(oldest.number), dir_fd=self._folder_fd)
            self.total -= oldest.size
        if self.total + num_bytes > self._max_bytes:
            raise RingFull(f"{num_bytes} bytes more do not fit into {self._max_bytes}")


def latest(folder: Path) -> list[Path]:
    """The segments of a ring, newest first; those of the ring that was written last, where `folder` holds several.

    Raises OSError.
    """
    rings = [_in_order(ring) for ring in (folder, *(one for one in folder.iterdir() if one.is_dir()))]
    return max((ring for ring in rings if ring), key=lambda ring: ring[0].stat().st_mtime, default=[])


def _in_order(folder: Path) -> list[Path]:
    named = [(int(match[1]), file) for file in folder.iterdir() if (match := NAME.fullmatch(file.name))]
    return [file for _, file in sorted(named, reverse=True)]


def _name(number: int) -> str:
    return f"segment-{number:06}.kinrec"


def _take_slot(folder: Path) -> tuple[str, int]:
    """Name and descriptor of a subfolder that is ours, and stays ours as long as the descriptor is open."""
    base = os.open(folder, FOLDER_FLAGS)
    try:
        for slot in map(str, range(MAX_SLOTS)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(slot, 0o700, dir_fd=base)
            try:
                fd = os.open(slot, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=base)
            except OSError:
                continue
            if _lock(fd):
                return slot, fd
            os.close(fd)
    finally:
        os.close(base)
    raise OSError(f"none of the subfolders 0 to {MAX_SLOTS - 1} of {folder} can be had")


def _lock(fd: int) -> bool:
    """Whether this folder is ours alone now: of our user, closed to others, and used by no other worker."""
    if os.fstat(fd).st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    os.fchmod(fd, 0o700)
    return True


def _segments(folder_fd: int) -> list[_File]:
    """Those that lie there, oldest first."""
    found: list[_File] = []
    for name in os.listdir(folder_fd):
        match = NAME.fullmatch(name)
        if match is None:
            continue
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            found.append(_File(int(match[1]), status.st_size))
    return sorted(found, key=lambda file: file.number)
