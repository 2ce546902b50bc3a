"""What the ranks of one worker say to each other inside a forward: one small interface, three ways to carry it.

A collective is entered because the plan says so, in the same order on every rank; no decision depends on one.
`SharedMemoryCommunicator` (its own module) is for ranks of one host without GPUs, `ProcessGroupCommunicator` for the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class CommunicatorTimeout(Exception):
    """Raised when a peer is gone or did not enter a collective in time; the group cannot go on."""


class Communicator(Protocol):
    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum the contiguous `tensor` over the ranks, in place: every rank gets the same bits."""

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        """On rank 0 every rank's `tensor`, in rank order; None on the others.

        `tensor`: [R, widths[rank]], R alike on all ranks.
        """

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the contiguous `tensor` with rank 0's, in place."""

    def close(self) -> None: ...


class SoloCommunicator:
    """A group of one."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        return

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        return [tensor]

    def broadcast(self, tensor: Tensor) -> None:
        return

    def close(self) -> None:
        return


class ProcessGroupCommunicator:
    """torch.distributed: NCCL between GPUs, gloo between hosts without. Deadlines are the group's `timeout`.

    With gloo, bfloat16 is summed as float32; NCCL sums it as it is.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> None:
        narrow = tensor.device.type == "cpu" and tensor.dtype != torch.float32
        total = tensor.float() if narrow else tensor
        try:
            dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            raise CommunicatorTimeout(f"all_reduce: {error}") from error
        if narrow:
            tensor.copy_(total)

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        try:
            if self.rank != 0:
                dist.send(tensor.contiguous(), group=self._group, group_dst=0)
                return None
            parts = [tensor, *(tensor.new_empty((len(tensor), width)) for width in widths[1:])]
            for source in range(1, self.world_size):
                dist.recv(parts[source], group=self._group, group_src=source)
        except RuntimeError as error:
            raise CommunicatorTimeout(f"gather: {error}") from error
        return parts

    def broadcast(self, tensor: Tensor) -> None:
        try:
            dist.broadcast(tensor, group=self._group, group_src=0)
        except RuntimeError as error:
            raise CommunicatorTimeout(f"broadcast: {error}") from error

    def close(self) -> None:
        dist.destroy_process_group(self._group)
