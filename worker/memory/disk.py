"""The pages of one rank on disk: a file that nobody else can open, emptied at every start."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.core.arrays import Int32s

ALIGNMENT = 4096
HUGE_BYTES = 2 << 20
LARGE_BYTES = 256 << 10
NEVER_WRITTEN = -1
CLOSED = -1

Bytes = npt.NDArray[np.uint8]


class DiskError(Exception):
    """Raised when the file cannot be made, or a page cannot be written or does not read as it was written."""


def aligned(num_bytes: int) -> Bytes:
    """Memory that direct I/O can use, in huge pages where it is large: first touches cost more than the copy else."""
    size = max(num_bytes, ALIGNMENT)
    is_large = num_bytes >= LARGE_BYTES
    if is_large:
        size = -(-size // HUGE_BYTES) * HUGE_BYTES + HUGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content = np.frombuffer(memory, np.uint8)
    if not is_large:
        return content[:num_bytes]
    # A system without huge pages says so, and it works all the same.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -content.ctypes.data % HUGE_BYTES
    return content[start : start + num_bytes]


class DiskFile:
    """`num_pages` pages of `stride` bytes each, `page_bytes` rounded up to what direct I/O needs.

    The file has mode 0600, all its blocks are reserved at once, and it has no name any more when this returns. Each
    page has a checksum, kept in memory. `is_direct`: it is read and written past the page cache, where the file system
    can do that. Used by one thread at a time.
    """

    def __init__(self, folder: Path, num_pages: int, page_bytes: int) -> None:
        """Raises DiskError, naming folder and size."""
        self.page_bytes = page_bytes
        self.stride = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        self._checksums = np.full(num_pages, NEVER_WRITTEN, np.int64)
        size = num_pages * self.stride
        path = folder / f".kinroute-pages-{secrets.token_hex(8)}"
        try:
            self._fd, self.is_direct = _create(path)
            try:
                # Before it grows: a process that is killed here leaves no large file behind.
                os.unlink(path)
                os.posix_fallocate(self._fd, 0, size)
            except OSError:
                self.close()
                raise
        except OSError as error:
            raise DiskError(f"{folder} cannot hold a disk tier of {size} bytes: {error.strerror}") from error

    def forget(self, pages: Int32s) -> None:
        """They hold nothing until they are written again."""
        self._checksums[pages] = NEVER_WRITTEN

    def write(self, page: int, content: Bytes) -> None:
        """`content`: `stride` bytes of aligned memory. Raises DiskError; the page holds nothing then."""
        self._checksums[page] = NEVER_WRITTEN
        try:
            written = self._pwrite(content, page * self.stride)
        except OSError as error:
            raise DiskError(f"writing page {page}: {error.strerror}") from error
        if written != self.stride:
            raise DiskError(f"writing page {page}: {written} of {self.stride} bytes")
        self._checksums[page] = zlib.crc32(content[: self.page_bytes].data)

    def read(self, page: int, into: Bytes) -> None:
        """`into`: `stride` bytes of aligned memory. Raises DiskError."""
        expected = int(self._checksums[page])
        if expected == NEVER_WRITTEN:
            raise DiskError(f"page {page} was never written")
        try:
            read = self._preadv(into, page * self.stride)
        except OSError as error:
            raise DiskError(f"reading page {page}: {error.strerror}") from error
        if read != self.stride or zlib.crc32(into[: self.page_bytes].data) != expected:
            raise DiskError(f"page {page} does not read as it was written")

    def _pwrite(self, content: Bytes, offset: int) -> int:
        return os.pwrite(self._fd, content.data, offset)

    def _preadv(self, into: Bytes, offset: int) -> int:
        return os.preadv(self._fd, [into.data], offset)

    def close(self) -> None:
        """Nothing is read or written any more: to try raises DiskError."""
        if self._fd != CLOSED:
            os.close(self._fd)
            self._fd = CLOSED


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some file systems make the file before they refuse.
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o600), False
