"""The pages of one rank in its host's memory."""

from __future__ import annotations

import torch

from worker.memory.layout import KvLayout


class HostPool:
    """`num_pages` pages as one tensor of bytes [P, page_bytes], pinned where the device is a GPU."""

    def __init__(self, layout: KvLayout, num_pages: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self.tensor = torch.empty((num_pages, layout.page_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
