"""`kinroute bench tiers`: how fast pages move between the tiers of a rank, beside what the machine does without us."""

from __future__ import annotations

import contextlib
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker.core.tiers import CopyEnded, CopyWork, Tier
from worker.memory.device import DevicePool
from worker.memory.disk import DiskFile, aligned
from worker.memory.host import HostPool
from worker.memory.layout import KvLayout
from worker.memory.mover import Mover

MIB = 1 << 20
DEADLINE_S = 60.0
PAIRS = (
    (Tier.DEVICE, Tier.HOST),
    (Tier.HOST, Tier.DEVICE),
    (Tier.DEVICE, Tier.DISK),
    (Tier.HOST, Tier.DISK),
    (Tier.DISK, Tier.DEVICE),
)


@dataclass(frozen=True, slots=True)
class TiersSize:
    """`batches`: pages per copy. `copied_bytes`: what each figure moves, `repeats` times; medians count."""

    batches: tuple[int, ...] = (1, 64)
    copied_bytes: int = 64 * MIB
    repeats: int = 5
    matmul: int = 512
    matmuls: int = 40


LAYOUTS = {
    "SmolLM2-135M": KvLayout(30, 3, 64, 32, "bfloat16", 0, 3),
    "1 MiB": KvLayout(32, 4, 128, 16, "bfloat16", 0, 4),
    "64 KiB": KvLayout(4, 2, 64, 16, "float32", 0, 2),
}


def run(size: TiersSize | None = None, folder: Path | None = None) -> dict[str, Any]:
    """MiB/s of copies of one rank. `of_plain`: the share of what one contiguous numpy copy, or direct file I/O page by
    page without checksums, reaches; the two are measured in turns. The disk is that of `folder`, or of the system's
    temporary files. `compute_slowed_by_copies`: how many times longer a matrix product on one thread takes beside
    copies without pause."""
    size = size or TiersSize()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for name, layout in LAYOUTS.items():
            with contextlib.closing(_Bench(layout, size, Path(made))) as bench:
                rows += _rows(name, bench, size)
        with contextlib.closing(_Bench(LAYOUTS["SmolLM2-135M"], size, Path(made))) as bench:
            slowed = _slowed(bench, size)
            is_direct = bench.disk.is_direct
    return {"disk_is_direct": is_direct, "compute_slowed_by_copies": slowed, "rows": rows}


class _Bench:
    """A rank with a mover, and pages enough of each tier; and the same bytes without us."""

    def __init__(self, layout: KvLayout, size: TiersSize, folder: Path) -> None:
        self.num_pages = max(1, size.copied_bytes // layout.page_bytes)
        self.page_bytes = layout.page_bytes
        self.pool = DevicePool(layout, self.num_pages, torch.device("cpu"))
        self.pool.tensor.normal_()
        self.host = HostPool(layout, self.num_pages, torch.device("cpu"))
        self.disk = DiskFile(folder, self.num_pages, layout.page_bytes)
        self.ended: queue.SimpleQueue[CopyEnded] = queue.SimpleQueue()
        self.mover = Mover(self.pool, self.host, self.disk, self.ended.put, deadline_s=DEADLINE_S)
        self.plain = _Plain(self.disk.stride, self.num_pages, folder, is_direct=self.disk.is_direct)
        self._number = 0

    @property
    def mib(self) -> float:
        """In all pages."""
        return self.num_pages * self.page_bytes / MIB

    def move(self, source: Tier, target: Tier, batch: int) -> float:
        """All pages once, `batch` at a time; seconds."""
        pages = np.arange(self.num_pages, dtype=np.int32)
        began_s = time.perf_counter()
        copies = 0
        for start in range(0, self.num_pages, batch):
            self._number += 1
            part = pages[start : start + batch]
            self.mover.submit([CopyWork(self._number, source, target, part, part)])
            copies += 1
        for _ in range(copies):
            ended = self.ended.get()
            assert not ended.why, ended.why
        return time.perf_counter() - began_s

    def close(self) -> None:
        self.mover.close()
        self.plain.close()
        self.pool.close()


class _Plain:
    """As many pages: one numpy copy of all, and one direct read or write after the other. Each returns seconds."""

    def __init__(self, stride: int, num_pages: int, folder: Path, *, is_direct: bool) -> None:
        self._stride, self._num_pages = stride, num_pages
        self._source, self._target = np.ones(stride * num_pages, np.uint8), np.ones(stride * num_pages, np.uint8)
        self._page = aligned(stride)
        with tempfile.TemporaryFile(dir=folder) as file:
            self._fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | (os.O_DIRECT if is_direct else 0))
        os.posix_fallocate(self._fd, 0, stride * num_pages)

    def measure(self, source: Tier, target: Tier) -> float:
        if Tier.DISK not in (source, target):
            return _seconds(lambda: np.copyto(self._target, self._source))
        return _seconds(self._write if target is Tier.DISK else self._read)

    def _write(self) -> None:
        for number in range(self._num_pages):
            os.pwrite(self._fd, self._page.data, number * self._stride)

    def _read(self) -> None:
        for number in range(self._num_pages):
            os.preadv(self._fd, [self._page.data], number * self._stride)

    def close(self) -> None:
        os.close(self._fd)


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _rows(name: str, bench: _Bench, size: TiersSize) -> list[dict[str, Any]]:
    for pair in PAIRS:
        bench.move(*pair, bench.num_pages)
        bench.plain.measure(*pair)
    rows = []
    for source, target in PAIRS:
        for batch in size.batches:
            turns = [
                (bench.plain.measure(source, target), bench.move(source, target, batch)) for _ in range(size.repeats)
            ]
            rows.append(
                {
                    "page": name,
                    "page_kib": bench.page_bytes / 1024,
                    "from": source.name.lower(),
                    "to": target.name.lower(),
                    "pages_per_copy": batch,
                    "mib_per_s": statistics.median(bench.mib / ours_s for _, ours_s in turns),
                    "plain_mib_per_s": statistics.median(bench.mib / plain_s for plain_s, _ in turns),
                    "of_plain": statistics.median(plain_s / ours_s for plain_s, ours_s in turns),
                }
            )
    return rows


def _slowed(bench: _Bench, size: TiersSize) -> float:
    """Alone and beside copies to the host and back, in turns."""
    bench.move(Tier.DEVICE, Tier.HOST, bench.num_pages)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.randn(size.matmul, size.matmul)

    def compute() -> None:
        for _ in range(size.matmuls):
            torch.mm(matrix, matrix)

    def beside() -> float:
        over = threading.Event()

        def copy() -> None:
            while not over.is_set():
                bench.move(Tier.DEVICE, Tier.HOST, 64)
                bench.move(Tier.HOST, Tier.DEVICE, 64)

        copying = threading.Thread(target=copy)
        copying.start()
        try:
            return _seconds(compute)
        finally:
            over.set()
            copying.join()

    compute()
    turns = [(_seconds(compute), beside()) for _ in range(size.repeats)]
    torch.set_num_threads(threads)
    return statistics.median(beside_s / alone_s for alone_s, beside_s in turns)
