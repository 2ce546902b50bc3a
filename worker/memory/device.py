"""The pages of one rank on its device."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from worker.core.types import PageId
from worker.memory.layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# linux/fcntl.h; Python has no name for it before 3.13.
F_SEAL_FUTURE_WRITE = 0x0010


class DevicePool:
    """`num_pages` pages as one tensor [P, L, 2, Hkv, B, D].

    On a CPU it lies in a memfd, so that another process of this host can map it, to read and not to write or cut it:
    `fd` and `nbytes` name it. On CUDA `fd` is None. `close` frees it; the tensor must not be used after that.
    """

    def __init__(self, layout: KvLayout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.nbytes = layout.page_bytes * num_pages
        self.fd: int | None = None
        shape, dtype = layout.shape(num_pages), TORCH_DTYPES[layout.dtype]
        if device.type == "cpu":
            self.fd = os.memfd_create("kinroute-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.nbytes)
            self._map = mmap.mmap(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE)
            self.tensor = torch.frombuffer(self._map, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    def copy_pages(self, pairs: Sequence[tuple[PageId, PageId]]) -> None:
        """Copy each (source, target), in order; no page is both."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            device = self.tensor.device
            self.tensor[torch.tensor(targets, device=device)] = self.tensor[torch.tensor(sources, device=device)]

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
