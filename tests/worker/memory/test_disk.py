"""The file of a disk tier: nobody else's, and what it does not give back as it was written is said to be lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from worker.memory.disk import Bytes, DiskError, DiskFile, aligned

PAGE_BYTES = 5000
NUM_PAGES = 4


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    disk = DiskFile(tmp_path, NUM_PAGES, PAGE_BYTES)
    yield disk
    disk.close()


def page_of(disk: DiskFile, value: int) -> Bytes:
    page = aligned(disk.stride)
    page[:] = np.arange(disk.stride) % 251 + value
    return page


def opened(folder: Path) -> Path:
    """Where this process has the file open."""
    (found,) = [
        Path(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}") and str(folder) in os.readlink(f"/proc/self/fd/{fd}")
    ]
    return found


def test_pages_come_back_as_they_were_written(disk: DiskFile) -> None:
    for number in range(NUM_PAGES):
        disk.write(number, page_of(disk, number))
    disk.write(2, page_of(disk, 4))

    into = aligned(disk.stride)
    for number, value in ((0, 0), (1, 1), (2, 4), (3, 3)):
        disk.read(number, into)
        assert np.array_equal(into[:PAGE_BYTES], page_of(disk, value)[:PAGE_BYTES])


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, (256 << 10) - 1, 256 << 10, (2 << 20) + 4096])
def test_memory_for_direct_reads_and_writes_is_aligned_and_as_large_as_asked_for(num_bytes: int) -> None:
    memory = aligned(num_bytes)

    assert memory.shape == (num_bytes,)
    assert memory.ctypes.data % 4096 == 0
    assert not memory.any()
    memory[:] = 1
    assert memory.sum() == num_bytes


def test_the_file_has_no_name_and_no_other_user_may_open_it(disk: DiskFile, tmp_path: Path) -> None:
    told = opened(tmp_path).stat()

    assert list(tmp_path.iterdir()) == []
    assert told.st_mode & 0o777 == 0o600
    assert told.st_size == NUM_PAGES * disk.stride
    assert told.st_blocks * 512 >= told.st_size


def test_one_flipped_bit_is_found(disk: DiskFile, tmp_path: Path) -> None:
    disk.write(0, page_of(disk, 0))
    disk.write(1, page_of(disk, 1))
    with opened(tmp_path).open("r+b") as file:
        file.seek(disk.stride + 77)
        (byte,) = file.read(1)
        file.seek(disk.stride + 77)
        file.write(bytes([byte ^ 1]))

    into = aligned(disk.stride)
    disk.read(0, into)
    with pytest.raises(DiskError, match="page 1 does not read as it was written"):
        disk.read(1, into)


def test_a_page_that_was_never_written_is_not_read(disk: DiskFile) -> None:
    with pytest.raises(DiskError, match="page 3 was never written"):
        disk.read(3, aligned(disk.stride))


def test_pages_that_were_forgotten_are_not_read(disk: DiskFile) -> None:
    for number in range(NUM_PAGES):
        disk.write(number, page_of(disk, number))

    disk.forget(np.array([1, 2], np.int32))

    disk.read(3, aligned(disk.stride))
    with pytest.raises(DiskError, match="page 2 was never written"):
        disk.read(2, aligned(disk.stride))


def test_a_closed_file_is_closed_once_and_touches_no_file_that_got_its_number(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, NUM_PAGES, PAGE_BYTES)
    disk.close()
    with (tmp_path / "another").open("w+b") as another:
        with pytest.raises(DiskError, match="writing page 0: Bad file descriptor"):
            disk.write(0, page_of(disk, 0))
        disk.close()

        assert os.fstat(another.fileno()).st_size == 0


def test_a_file_that_was_cut_gives_no_page(disk: DiskFile, tmp_path: Path) -> None:
    disk.write(3, page_of(disk, 0))
    os.truncate(opened(tmp_path), 2 * disk.stride)

    with pytest.raises(DiskError, match="page 3"):
        disk.read(3, aligned(disk.stride))


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    # Not even root makes files in the last one.
    for folder in (tmp_path / "missing", tmp_path / "file", Path("/sys/kernel")):
        with pytest.raises(DiskError, match=f"{folder} cannot hold a disk tier of 32768 bytes"):
            DiskFile(folder, NUM_PAGES, PAGE_BYTES)


FULL = """
import pathlib, resource, signal, sys
from worker.memory.disk import DiskError, DiskFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    DiskFile(pathlib.Path(sys.argv[1]), 4, 5000)
except DiskError as error:
    print(error)
"""


def test_too_little_room_is_said_at_the_start_and_leaves_no_file(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)

    assert said.stdout.startswith(f"{tmp_path} cannot hold a disk tier of 32768 bytes: ")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """One of 64 KiB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root mounts file systems")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system_is_said_at_the_start_and_what_fits_still_does(small_file_system: Path) -> None:
    with pytest.raises(DiskError, match=f"{small_file_system} cannot hold a disk tier of 81920 bytes: No space left"):
        DiskFile(small_file_system, 10, PAGE_BYTES)
    assert list(small_file_system.iterdir()) == []

    disk = DiskFile(small_file_system, 8, PAGE_BYTES)
    disk.write(7, page_of(disk, 3))
    into = aligned(disk.stride)
    disk.read(7, into)
    assert np.array_equal(into, page_of(disk, 3))
    disk.close()
