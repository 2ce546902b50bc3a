"""A rank's pages as bytes to send, to receive, and to copy.

On the wire a page is [L, 2, h, B, D] for the h heads that were asked for, and pages follow each other. Heads here are
counted from the first that the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.memory.transfer.staged_pages import StagedPages
from worker.memory.transfer.stretches import Pages, stretches

Pieces = list[memoryview]
Rows = npt.NDArray[np.uint8]
"""Pages as [P, 2 L, H, X]: X bytes are one head's K or V in one layer."""

DIRECT_BYTES = 4 << 20
STAGED_BYTES = 1 << 20
"""Small enough to be still in the cache when it is read again."""


class PageBytes(Protocol):
    def read(self, pages: Pages, heads: tuple[int, int]) -> Iterator[Pieces]:
        """The bytes of these heads of these pages, some pieces at a time, valid until the next are asked for."""

    def write(self, pages: Pages, heads: tuple[int, int]) -> Iterator[Pieces]:
        """Pieces to fill, in the same order. What they hold is in its pages once the next are asked for, or once there
        are none. Nothing is written after the iterator was closed."""


def page_bytes_of(pool: DevicePool) -> PageBytes:
    if pool.tensor.device.type == "cpu":
        return HostPages(rows_of(pool.tensor))
    return StagedPages(pool.tensor, STAGED_BYTES)


def rows_of(tensor: torch.Tensor) -> Rows:
    """A pool in this host's memory, without a copy."""
    num_pages, _, _, heads, _, _ = tensor.shape
    rows: Rows = tensor.view(torch.uint8).numpy().reshape(num_pages, -1, heads, _head_bytes(tensor))
    return rows


def rows_in(buffer: npt.NDArray[np.uint8], layout: KvLayout) -> Rows:
    """A pool of that layout that lies in `buffer`."""
    whole = len(buffer) // layout.page_bytes * layout.page_bytes
    return buffer[:whole].reshape(whole // layout.page_bytes, 2 * layout.num_layers, layout.heads, -1)


def _head_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[4] * tensor.shape[5] * tensor.element_size()


class HostPages:
    """Pages in this host's memory. Whole pages are sent and received where they lie; parts of them are staged."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def read(self, pages: Pages, heads: tuple[int, int]) -> Iterator[Pieces]:
        if self._are_whole(heads):
            yield from self._direct(pages)
            return
        for chunk, staged in self._stage(pages, heads):
            for place, page in zip(staged, chunk, strict=True):
                np.copyto(place, self.rows[page, :, heads[0] : heads[1]])
            yield [staged.reshape(-1).data]

    def write(self, pages: Pages, heads: tuple[int, int]) -> Iterator[Pieces]:
        if self._are_whole(heads):
            yield from self._direct(pages)
            return
        for chunk, staged in self._stage(pages, heads):
            yield [staged.reshape(-1).data]
            for place, page in zip(staged, chunk, strict=True):
                np.copyto(self.rows[page, :, heads[0] : heads[1]], place)

    def copy_from(
        self, source: Rows, source_pages: Pages, source_heads: tuple[int, int], pages: Pages, heads: tuple[int, int]
    ) -> Iterator[int]:
        """Copy page by page, neighbours at once; yields now and then how many bytes were copied since."""
        source_part = source[:, :, source_heads[0] : source_heads[1]]
        part = self.rows[:, :, heads[0] : heads[1]]
        page_bytes = part[0].size
        copied = 0
        for start, stop in stretches(max(1, DIRECT_BYTES // page_bytes), source_pages, pages):
            count = stop - start
            first_source, first = int(source_pages[start]), int(pages[start])
            np.copyto(part[first : first + count], source_part[first_source : first_source + count])
            copied += count * page_bytes
            if copied >= DIRECT_BYTES:
                yield copied
                copied = 0
        yield copied

    def _are_whole(self, heads: tuple[int, int]) -> bool:
        return heads == (0, self.rows.shape[2])

    def _direct(self, pages: Pages) -> Iterator[Pieces]:
        num_bytes, pieces = 0, []
        for start, stop in stretches(max(1, DIRECT_BYTES // self.rows[0].size), pages):
            first = int(pages[start])
            pieces.append(self.rows[first : first + stop - start].reshape(-1).data)
            num_bytes += len(pieces[-1])
            if num_bytes >= DIRECT_BYTES:
                yield pieces
                num_bytes, pieces = 0, []
        yield pieces

    def _stage(self, pages: Pages, heads: tuple[int, int]) -> Iterator[tuple[Pages, Rows]]:
        """Pages a chunk at a time, with room for their parts, which is used again."""
        _, num_rows, _, head_bytes = self.rows.shape
        width = heads[1] - heads[0]
        step = max(1, min(len(pages), STAGED_BYTES // (num_rows * width * head_bytes)))
        room = np.empty((step, num_rows, width, head_bytes), np.uint8)
        for start in range(0, len(pages), step):
            chunk = pages[start : start + step]
            yield chunk, room[: len(chunk)]
