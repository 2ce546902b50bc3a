"""A communicator for the ranks of one host: each writes into its own slot of a shared mapping and reads the others'.

Two slots a rank, used in turn, need one signal per collective: a rank that begins a collective has seen everybody enter
the one before, so everybody is done with the slot of the one before that. A rank that waits looks for a while, then
sleeps on a futex, since ranks may outnumber cores. It wakes every millisecond to look at its deadline, which bounds the
cost of a lost wake too (the store of "I sleep" became visible late).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker.model import futex
from worker.model.communicator import CommunicatorTimeout

LINE = 64
"""Bytes between two ranks' words, so that they share no cache line."""
WORDS = LINE // 4
NAP_S = 0.001
LOOK_S = 100e-6
"""How long a waiting rank looks before it sleeps, where every rank can have a core."""


class SharedMemoryCommunicator:
    """Joins the group that meets at `path`; returns once all `world_size` ranks have come.

    `path` (in /dev/shm) must be new for each group; whoever comes first makes it, rank 0 removes it when all have come.
    `slot_bytes` bounds one piece; larger tensors go in pieces. `deadline_s`: how long a peer may be late,
    at first `meeting_s`. Raises CommunicatorTimeout.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        world_size: int,
        *,
        slot_bytes: int = 1 << 20,
        deadline_s: float = 60.0,
        meeting_s: float = 60.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._slot_bytes = slot_bytes
        self._deadline_s = meeting_s
        self._look_s = LOOK_S if len(os.sched_getaffinity(0)) >= world_size else 0.0
        header = 2 * LINE * world_size
        self._map = _map(path, header + 2 * world_size * slot_bytes)
        # Row r: how many collectives rank r has entered; behind all of these, whether somebody sleeps on rank r.
        self._words = memoryview(self._map)[:header].cast("I")
        base = np.frombuffer(self._map, np.uint8).ctypes.data
        self._addresses = [base + peer * LINE for peer in range(world_size)]
        data = torch.frombuffer(self._map, dtype=torch.uint8, offset=header)
        self._slots = data.view(2, world_size, slot_bytes)
        self._views: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._count = 0
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._exchange(torch.zeros(1))
        self._deadline_s = deadline_s
        if rank == 0:
            path.unlink()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums in rank order; bfloat16 is accumulated as float32."""
        flat = tensor.view(-1)
        step = self._slot_bytes // flat.element_size()
        for start in range(0, flat.numel(), step):
            self._sum_piece(flat[start : start + step])

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        rows, flat = len(tensor), tensor.reshape(-1)
        parts = [tensor.new_empty(rows * width) for width in widths] if self.rank == 0 else None
        step = self._slot_bytes // flat.element_size()
        for start in range(0, rows * max(widths), step):
            slots = self._exchange(flat[start : start + step])
            for part, slot in zip(parts or (), slots, strict=False):
                piece = part[start : start + step]
                piece.copy_(slot[: piece.numel()])
        return None if parts is None else [part.view(rows, -1) for part in parts]

    def broadcast(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        step = self._slot_bytes // flat.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            slots = self._exchange(piece if self.rank == 0 else piece[:0])
            piece.copy_(slots[0][: piece.numel()])

    def close(self) -> None:
        """Forget the mapping; it is unmapped when no view of it is left."""
        self._views.clear()

    def _sum_piece(self, flat: Tensor) -> None:
        size = flat.numel()
        slots = self._exchange(flat)
        if self.world_size == 2:
            # One rounding either way: `add` computes in float32.
            torch.add(slots[0][:size], slots[1][:size], out=flat)
            return
        total = slots[0][:size].to(torch.float32, copy=True)
        for slot in slots[1:]:
            total += slot[:size]
        flat.copy_(total)

    def _exchange(self, flat: Tensor) -> list[Tensor]:
        """Put `flat` into this rank's slot; returns all ranks' whole slots once they are filled."""
        if flat.dtype not in self._views:
            typed = self._slots.view(flat.dtype)
            self._views[flat.dtype] = (list(typed[0]), list(typed[1]))
        slots = self._views[flat.dtype][self._count & 1]
        slots[self.rank][: flat.numel()].copy_(flat)
        futex.fence()
        before = self._count & 0xFFFFFFFF
        self._count += 1
        self._words[self.rank * WORDS] = self._count & 0xFFFFFFFF
        asleep = (self.world_size + self.rank) * WORDS
        if self._words[asleep]:
            self._words[asleep] = 0
            futex.wake(self._addresses[self.rank])
        for peer in self._peers:
            if self._words[peer * WORDS] == before:
                self._await(peer, before)
        futex.fence()
        return slots

    def _await(self, peer: int, before: int) -> None:
        """Until rank `peer`, which has entered `before` collectives, enters the next."""
        words, at = self._words, peer * WORDS
        start_s = time.monotonic()
        while (waited_s := time.monotonic() - start_s) < self._look_s:
            if words[at] != before:
                return
        while words[at] == before:
            if waited_s > self._deadline_s:
                raise CommunicatorTimeout(f"rank {peer} did not enter collective {self._count} in {self._deadline_s} s")
            words[(self.world_size + peer) * WORDS] = 1
            futex.wait(self._addresses[peer], before, NAP_S)
            waited_s = time.monotonic() - start_s


def _map(path: Path, size: int) -> mmap.mmap:
    """Nobody may read what other users' processes share; all ranks give the same size."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
