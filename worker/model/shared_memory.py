"""A communicator for the ranks of one host: each rank writes into its own slot of a shared mapping and reads the others'.

Two buffers a rank, used in turn, need one signal per collective: a rank that is two collectives ahead would have to
have seen everybody in the one between, and so everybody is done with the older buffer. A rank that waits looks a few
times, then sleeps on a futex, since ranks may outnumber cores; it wakes every millisecond to look at the deadline.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker.model.communicator import CommunicatorTimeout

LINE = 64
LOOKS = 200
NAP_NS = 1_000_000
FUTEX_WAIT, FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemoryCommunicator:
    """`path`: a file all ranks can map (in /dev/shm), named alike on all, made by whoever comes first.

    `slot_bytes` bounds one piece; larger tensors go in pieces. `deadline_s`: how long a peer may be late.
    """

    def __init__(
        self, path: Path, rank: int, world_size: int, *, slot_bytes: int = 1 << 20, deadline_s: float = 60.0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._slot_bytes = slot_bytes
        self._deadline_s = deadline_s
        header = 2 * LINE * world_size
        size = header + 2 * world_size * slot_bytes
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        # Row r: the number of collectives that rank r has entered; behind them, whether somebody sleeps on it.
        words = np.frombuffer(self._map, np.int32, count=header // 4)
        self._entered = words[: world_size * LINE // 4 : LINE // 4]
        self._sleepers = words[world_size * LINE // 4 :: LINE // 4]
        self._addresses = [words.ctypes.data + peer * LINE for peer in range(world_size)]
        data = torch.frombuffer(self._map, dtype=torch.uint8, offset=header)
        self._slots = data.view(2, world_size, slot_bytes)
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}
        self._count = 0
        self._peers = [peer for peer in range(world_size) if peer != rank]

    def all_reduce(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        step = self._slot_bytes // flat.element_size()
        for start in range(0, flat.numel(), step):
            self._all_reduce_piece(flat[start : start + step])

    def _all_reduce_piece(self, flat: Tensor) -> None:
        slots = self._exchange(flat)
        if self.world_size == 2:
            torch.add(slots[0], slots[1], out=flat)
        else:
            total = slots[0].to(torch.float32, copy=True)
            for slot in slots[1:]:
                total += slot
            flat.copy_(total)

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """`tensor`: [R, W], W differing by rank; goes row by row where it does not fit a slot."""
        rows, width = tensor.shape
        widths = [int(slot[0]) for slot in self._exchange(torch.tensor([width], dtype=torch.int64))]
        fit = max(1, self._slot_bytes // (max(widths) * tensor.element_size()))
        parts = [tensor.new_empty((rows, w)) for w in widths] if self.rank == 0 else None
        for start in range(0, rows, fit):
            piece = tensor[start : start + fit]
            slots = self._exchange(piece.reshape(-1), [len(piece) * w for w in widths])
            if parts is not None:
                for part, slot, w in zip(parts, slots, widths, strict=True):
                    part[start : start + fit] = slot.view(-1, w)
        return parts

    def close(self) -> None:
        self._views.clear()

    def _exchange(self, flat: Tensor, lengths: list[int] | None = None) -> list[Tensor]:
        """Put `flat` into this rank's slot and return all ranks' slots once they are filled."""
        buffer = self._views.get(flat.dtype)
        if buffer is None:
            typed = self._slots.view(flat.dtype)
            buffer = self._views[flat.dtype] = [list(typed[parity]) for parity in (0, 1)]
        slots = buffer[self._count & 1]
        slots[self.rank][: flat.numel()].copy_(flat)
        self._count += 1
        self._entered[self.rank] = self._count
        if self._sleepers[self.rank]:
            self._sleepers[self.rank] = 0
            _syscall(_SYS_FUTEX, ctypes.c_void_p(self._addresses[self.rank]), FUTEX_WAKE, 2**30, None, None, 0)
        for peer in self._peers:
            self._await(peer)
        if lengths is None:
            return [slot[: flat.numel()] for slot in slots]
        return [slot[:length] for slot, length in zip(slots, lengths, strict=True)]

    def _await(self, peer: int) -> None:
        entered = self._entered
        for _ in range(LOOKS):
            if entered[peer] >= self._count:
                return
        end_s = time.monotonic() + self._deadline_s
        nap = _Timespec(0, NAP_NS)
        while (seen := int(entered[peer])) < self._count:
            self._sleepers[peer] = 1
            address = ctypes.c_void_p(self._addresses[peer])
            _syscall(_SYS_FUTEX, address, FUTEX_WAIT, ctypes.c_int(seen), ctypes.byref(nap), None, 0)
            if time.monotonic() > end_s:
                raise CommunicatorTimeout(f"rank {peer} did not enter collective {self._count} in {self._deadline_s} s")
