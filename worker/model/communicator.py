"""What the ranks of one worker say to each other inside a forward: one small interface, three ways to carry it.

A collective is entered because the plan says so, in the same order on every rank; no decision depends on one.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class CommunicatorTimeout(Exception):
    """Raised when a peer did not enter a collective in time; the group cannot go on."""


class Communicator(Protocol):
    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place, in rank order: every rank gets the same bits."""

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """On rank 0 every rank's tensor, in rank order (last dimensions may differ); None on the others."""

    def close(self) -> None: ...


class SoloCommunicator:
    """A group of one."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        return

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        return [tensor]

    def close(self) -> None:
        return


class ProcessGroupCommunicator:
    """torch.distributed: NCCL between GPUs, gloo between hosts without."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        width = torch.tensor([tensor.shape[-1]], device=tensor.device)
        widths = [torch.empty_like(width) for _ in range(self.world_size)]
        dist.all_gather(widths, width, group=self._group)
        parts = [tensor.new_empty((*tensor.shape[:-1], int(w))) for w in widths]
        if self.rank == 0:
            parts[0] = tensor
            for source in range(1, self.world_size):
                dist.recv(parts[source], source, group=self._group)
            return parts
        dist.send(tensor.contiguous(), 0, group=self._group)
        return None

    def close(self) -> None:
        dist.destroy_process_group(self._group)
