"""Ranks and sessions with known pages."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from worker.core.handoff import KvSource, SessionRef
from worker.core.shards import kv_head_ranges
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.memory.transfer.client import PullResult
from worker.memory.transfer.layouts import shape_of

BLOCK = 2
LAYERS = 2
HEAD_DIM = 4
NUM_PAGES = 24
WAIT_S = 30.0
SESSION_ID = "5e" * 16
SECRET = "a7" * 32
HELD = np.array([5, 6, 7, 20, 3, 4, 11], np.int32)
"""Pages of a session: neighbours, and not."""
HELD_TOKENS = len(HELD) * BLOCK - 1


def layouts(kv_heads: int, world_size: int, *, dtype: str = "bfloat16") -> list[KvLayout]:
    """Those of a group's ranks."""
    return [
        KvLayout(LAYERS, kv_heads, HEAD_DIM, BLOCK, dtype, start, stop)
        for start, stop in kv_head_ranges(kv_heads, world_size)
    ]


def whole_pages(kv_heads: int) -> torch.Tensor:
    """What all ranks of a model together hold: [P, L, 2, H, B, D], every number another."""
    shape = (NUM_PAGES, LAYERS, 2, kv_heads, BLOCK, HEAD_DIM)
    return torch.arange(int(np.prod(shape)), dtype=torch.int16).view(shape)


def filled_pool(layout: KvLayout) -> DevicePool:
    pool = DevicePool(layout, NUM_PAGES, torch.device("cpu"))
    pool.tensor.view(torch.int16).copy_(whole_pages(layout.num_kv_heads)[:, :, :, layout.head_start : layout.head_stop])
    return pool


def empty_pool(layout: KvLayout, num_pages: int = NUM_PAGES) -> DevicePool:
    return DevicePool(layout, num_pages, torch.device("cpu"))


def make_ref(
    layout: KvLayout,
    sources: list[tuple[str, KvLayout]],
    *,
    host_key: str = "",
    session_id: str = SESSION_ID,
    secret: str = SECRET,
    num_tokens: int = HELD_TOKENS,
) -> SessionRef:
    """`sources`: address and layout of each context rank."""
    found = []
    for address, held in sources:
        host, _, port = address.rpartition(":")
        found.append(KvSource(host, int(port), held.head_start, held.head_stop))
    return SessionRef(session_id, secret, "context-1", host_key, 1, 2, num_tokens, 0, shape_of(layout), tuple(found))


class Ending:
    """The `done` of a pull, which must come exactly once."""

    def __init__(self) -> None:
        self.results: list[PullResult] = []
        self._came = threading.Event()

    def __call__(self, result: PullResult) -> None:
        self.results.append(result)
        self._came.set()

    @property
    def has_come(self) -> bool:
        return self._came.is_set()

    def wait(self) -> PullResult:
        assert self._came.wait(WAIT_S), "the pull never ended"
        assert len(self.results) == 1, "a pull ended twice"
        return self.results[0]


def numbers(pool: DevicePool) -> npt.NDArray[np.int16]:
    """A copy of what is in a pool."""
    return pool.tensor.view(torch.int16).numpy().copy()
