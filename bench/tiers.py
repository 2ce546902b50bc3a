"""`kinroute bench tiers`: how fast pages move between the tiers of a rank, beside what the machine does without us."""

from __future__ import annotations

import functools
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
    """`batches`: pages per copy. `copied_bytes`: what each figure moves, `repeats` times; the median counts."""

    batches: tuple[int, ...] = (1, 64)
    copied_bytes: int = 96 * MIB
    repeats: int = 3
    matmul: int = 512
    matmuls: int = 60


LAYOUTS = {
    "SmolLM2-135M": KvLayout(30, 3, 64, 32, "bfloat16", 0, 3),
    "64 KiB": KvLayout(4, 2, 64, 16, "float32", 0, 2),
}


def run(size: TiersSize | None = None, folder: Path | None = None) -> dict[str, Any]:
    """MiB/s of copies of one rank. `of_plain`: the share of what plain copies or plain direct file I/O reach, in the
    same run. The disk is that of `folder`, or of the system's temporary files."""
    size = size or TiersSize()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for name, layout in LAYOUTS.items():
            rows += _rows(name, layout, size, Path(made))
        slowed = _slowed(LAYOUTS["SmolLM2-135M"], size, Path(made))
    return {"disk_is_direct": rows[-1].pop("direct"), "compute_slowed_by_copies": slowed, "rows": rows}


class _Bench:
    """A rank with a mover, and pages enough of each tier."""

    def __init__(self, layout: KvLayout, num_pages: int, folder: Path) -> None:
        self.pool = DevicePool(layout, num_pages, torch.device("cpu"))
        self.pool.tensor.normal_()
        self.host = HostPool(layout, num_pages, torch.device("cpu"))
        self.disk = DiskFile(folder, num_pages, layout.page_bytes)
        self.ended: queue.SimpleQueue[CopyEnded] = queue.SimpleQueue()
        self.mover = Mover(self.pool, self.host, self.disk, self.ended.put, deadline_s=DEADLINE_S)
        self.num_pages = num_pages
        self._number = 0

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
        self.pool.close()


def _rows(name: str, layout: KvLayout, size: TiersSize, folder: Path) -> list[dict[str, Any]]:
    num_pages = max(1, size.copied_bytes // layout.page_bytes)
    bench = _Bench(layout, num_pages, folder)
    moved_mib = num_pages * layout.page_bytes / MIB
    for pair in PAIRS:
        bench.move(*pair, num_pages)
    plain = {
        "memory": moved_mib / _median(size.repeats, _plain_copy(num_pages * layout.page_bytes)),
        "write": moved_mib / _median(size.repeats, _plain_file(bench.disk, folder, num_pages, "write")),
        "read": moved_mib / _median(size.repeats, _plain_file(bench.disk, folder, num_pages, "read")),
    }
    rows = []
    for source, target in PAIRS:
        kind = "write" if target is Tier.DISK else "read" if source is Tier.DISK else "memory"
        for batch in size.batches:
            took_s = _median(size.repeats, functools.partial(bench.move, source, target, batch))
            speed = moved_mib / took_s
            rows.append(
                {
                    "page": name,
                    "page_kib": layout.page_bytes / 1024,
                    "from": source.name.lower(),
                    "to": target.name.lower(),
                    "pages_per_copy": batch,
                    "mib_per_s": speed,
                    "plain_mib_per_s": plain[kind],
                    "of_plain": speed / plain[kind],
                }
            )
    rows[-1]["direct"] = bench.disk.is_direct
    bench.close()
    return rows


def _median(repeats: int, measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(repeats))


def _plain_copy(num_bytes: int) -> Callable[[], float]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    def measure() -> float:
        began_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began_s

    return measure


def _plain_file(disk: DiskFile, folder: Path, num_pages: int, kind: str) -> Callable[[], float]:
    """Page by page, as the same file system takes and gives them; no checksum, no other thread."""
    page = aligned(disk.stride)

    def measure() -> float:
        with tempfile.TemporaryFile(dir=folder) as file:
            flags = os.O_RDWR | (os.O_DIRECT if disk.is_direct else 0)
            fd = os.open(f"/proc/self/fd/{file.fileno()}", flags)
            try:
                os.posix_fallocate(fd, 0, num_pages * disk.stride)
                took_s = _each(num_pages, lambda number: os.pwrite(fd, page.data, number * disk.stride))
                if kind == "read":
                    took_s = _each(num_pages, lambda number: os.preadv(fd, [page.data], number * disk.stride))
                return took_s
            finally:
                os.close(fd)

    return measure


def _each(num_pages: int, do: Callable[[int], int]) -> float:
    began_s = time.perf_counter()
    for number in range(num_pages):
        do(number)
    return time.perf_counter() - began_s


def _slowed(layout: KvLayout, size: TiersSize, folder: Path) -> float:
    """How many times longer a matrix product on one thread takes while pages go to the host and come back."""
    num_pages = max(1, size.copied_bytes // layout.page_bytes)
    bench = _Bench(layout, num_pages, folder)
    bench.move(Tier.DEVICE, Tier.HOST, num_pages)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.randn(size.matmul, size.matmul)
    over = threading.Event()

    def compute() -> float:
        began_s = time.perf_counter()
        for _ in range(size.matmuls):
            torch.mm(matrix, matrix)
        return time.perf_counter() - began_s

    def copy() -> None:
        while not over.is_set():
            bench.move(Tier.DEVICE, Tier.HOST, 64)
            bench.move(Tier.HOST, Tier.DEVICE, 64)

    compute()
    alone_s = _median(size.repeats, compute)
    copying = threading.Thread(target=copy)
    copying.start()
    beside_s = _median(size.repeats, compute)
    over.set()
    copying.join()
    torch.set_num_threads(threads)
    bench.close()
    return beside_s / alone_s
