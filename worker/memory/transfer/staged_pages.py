"""Pages in a GPU's memory, which sockets reach through pinned host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch


class StagedPages:
    """`read` and `write` as `PageBytes` promises, through a buffer of about `staged_bytes`.

    On CUDA copies run on a stream of their own, and the thread waits for each: what was yielded is complete, and pages
    are in place when `write` ends. Uses torch off the engine thread, on these copies alone.
    """

    def __init__(self, tensor: torch.Tensor, staged_bytes: int) -> None:
        self._tensor = tensor
        self._staged_bytes = staged_bytes
        self._stream = _stream_of(tensor.device)

    def read(self, pages: npt.NDArray[np.int32], heads: tuple[int, int]) -> Iterator[list[memoryview]]:
        for chunk, room in self._stage(pages, heads):
            with self._copying():
                room.copy_(self._tensor[chunk, :, :, heads[0] : heads[1]], non_blocking=True)
            yield [_bytes_of(room)]

    def write(self, pages: npt.NDArray[np.int32], heads: tuple[int, int]) -> Iterator[list[memoryview]]:
        for chunk, room in self._stage(pages, heads):
            yield [_bytes_of(room)]
            with self._copying():
                arrived = room.to(self._tensor.device, non_blocking=True)
                self._tensor[chunk, :, :, heads[0] : heads[1]] = arrived

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield
        if self._stream is not None:
            self._stream.synchronize()

    def _stage(
        self, pages: npt.NDArray[np.int32], heads: tuple[int, int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pages a chunk at a time, as an index on the device, with room for their parts, which is used again."""
        tensor = self._tensor
        _, layers, sides, _, block, dim = tensor.shape
        shape = (layers, sides, heads[1] - heads[0], block, dim)
        step = max(1, min(len(pages), self._staged_bytes // (int(np.prod(shape)) * tensor.element_size())))
        room = torch.empty((step, *shape), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        index = torch.from_numpy(pages.astype(np.int64)).to(tensor.device)
        for start in range(0, len(pages), step):
            chunk = index[start : start + step]
            yield chunk, room[: len(chunk)]


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _bytes_of(room: torch.Tensor) -> memoryview:
    view: memoryview = room.view(torch.uint8).numpy().reshape(-1).data
    return view
