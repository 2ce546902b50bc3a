"""Puts a step's new keys and values into the pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class KvWriter:
    """`slots`: [T], page * B + offset; `pool`: [P, L, 2, Hkv, B, D], contiguous."""

    def __init__(self, slots: npt.NDArray[np.int64], pool: Tensor) -> None:
        _, layers, _, heads, block, self._dim = pool.shape
        self._rows = pool.view(-1, self._dim)
        self._layer_rows = 2 * heads * block
        page, offset = np.divmod(slots, block)
        # Of layer 0; another layer's lie a constant further on.
        blocks = (page * layers * 2 * heads)[:, None] + np.arange(heads)
        keys = (blocks * block + offset[:, None]).reshape(-1)
        self._keys = torch.from_numpy(keys).to(pool.device)
        self._values = torch.from_numpy(keys + heads * block).to(pool.device)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [T, Hkv, D]."""
        rows = self._rows[layer * self._layer_rows :]
        rows.index_copy_(0, self._keys, k.reshape(-1, self._dim))
        rows.index_copy_(0, self._values, v.reshape(-1, self._dim))
