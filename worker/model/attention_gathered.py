"""Paged attention with torch's own operations: copies the pages that a sequence reads, then attends over the copy.

The copy is a small share of the cost on a CPU, and one buffer serves all layers. Sequences that decode (one new token)
go together, padded to the longest of a group of similar length; those that prefill go one by one. A whole prompt reads
its keys and values as they come, not from its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.core.types import Batch
from worker.model.kv_writing import KvWriter

Indices = npt.NDArray[np.int64]
SHORT = 256
"""Below this many tokens a longer call costs more than padding."""


@dataclass(slots=True)
class _Group:
    """Sequences that attend in one call.

    rows: their new tokens' rows of [T], in order; new: new tokens per sequence; context_lens: [S], with the new ones;
    blocks: where their keys, then their values lie, flat [2 * S * Hkv * n]; None where the new tokens are all there is.
    """

    rows: slice | Tensor
    new: int
    context_lens: npt.NDArray[np.int32]
    blocks: Tensor | None
    buffer: Tensor | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)


class GatheredAttention:
    def __init__(self, batch: Batch, pool: Tensor) -> None:
        """`pool`: [P, L, 2, Hkv, B, D], contiguous."""
        _, self._layers, _, self._heads, self._block, self._dim = pool.shape
        self._device = pool.device
        self._block_rows = pool.view(-1, self._block * self._dim)
        self._writer = KvWriter(batch.slots, pool)
        self._groups = self._group(batch)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self._writer.write(layer, k, v)
        if len(self._groups) == 1 and isinstance(self._groups[0].rows, slice):
            return self._attend_group(self._groups[0], layer, q, k, v, scale, window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            rows_of_group = group.rows
            out[rows_of_group] = self._attend_group(
                group, layer, q[rows_of_group], k[rows_of_group], v[rows_of_group], scale, window
            )
        return out

    def _group(self, batch: Batch) -> list[_Group]:
        lengths = np.diff(batch.query_starts)
        groups = []
        decoding = np.flatnonzero(lengths == 1)
        for members in _similar(decoding, batch.context_lens):
            starts = batch.query_starts[members]
            every_row = len(members) == len(batch.token_ids)
            rows = slice(None) if every_row else self._to_device(starts)
            groups.append(self._gathering(batch, members, rows, 1))
        for member in np.flatnonzero(lengths > 1):
            start, stop = int(batch.query_starts[member]), int(batch.query_starts[member + 1])
            rows, new = slice(start, stop), stop - start
            if new == batch.context_lens[member]:
                groups.append(_Group(rows, new, batch.context_lens[[member]], None, None))
            else:
                groups.append(self._gathering(batch, np.array([member]), rows, new))
        return groups

    def _gathering(self, batch: Batch, members: Indices, rows: slice | Tensor, new: int) -> _Group:
        lens = batch.context_lens[members]
        # Padding reads page 0, behind the mask.
        pages = np.maximum(batch.page_table[members, : -(-int(lens.max()) // self._block)], 0).astype(np.int64)
        keys = (pages * self._layers * 2 * self._heads)[:, None, :] + np.arange(self._heads)[:, None]
        blocks = np.stack([keys, keys + self._heads]).reshape(-1)
        buffer = self._block_rows.new_empty((len(blocks), self._block * self._dim))
        return _Group(rows, new, lens, self._to_device(blocks), buffer)

    def _attend_group(
        self, group: _Group, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """q: [S * new, Hq, D], k and v likewise; returns the like of q."""
        sequences, new = len(group.context_lens), group.new
        if group.blocks is None:
            keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        else:
            torch.index_select(self._block_rows[layer * 2 * self._heads :], 0, group.blocks, out=group.buffer)
            assert group.buffer is not None
            longest = int(group.context_lens.max())
            keys, values = group.buffer.view(2, sequences, self._heads, -1, self._dim)[:, :, :, :longest]
        if new == 1:
            # A KV head's query heads stand in as its query positions: all of them see the same keys.
            queries = q.reshape(sequences, self._heads, -1, self._dim)
            mask = self._mask(group, keys.shape[2], window)
            answer = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            return answer.reshape(q.shape)
        causal = group.blocks is None and (window is None or window >= new)
        mask = None if causal else self._mask(group, keys.shape[2], window)
        answer = scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )
        return answer[0].transpose(0, 1)

    def _mask(self, group: _Group, width: int, window: int | None) -> Tensor | None:
        """[S, 1, new, width], to be added to scores: 0 for what a new token sees, else -inf. None if it sees all."""
        if window not in group.masks:
            lens = group.context_lens[:, None]
            at = (lens - group.new + np.arange(group.new))[:, :, None]
            positions = np.arange(width)
            seen = positions <= at
            if window is not None:
                seen &= positions > at - window
            group.masks[window] = None if seen.all() else self._hiding(~seen[:, None])
        return group.masks[window]

    def _hiding(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        """Made once a step: every layer would have to turn a mask of booleans into this."""
        at = torch.from_numpy(hidden).to(self._device)
        return torch.zeros(at.shape, dtype=self._block_rows.dtype, device=self._device).masked_fill_(at, -torch.inf)

    def _to_device(self, numbers: npt.NDArray[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device, torch.long)


def _similar(sequences: Indices, context_lens: npt.NDArray[np.int32]) -> list[Indices]:
    """Part `sequences` so that in each part the longest context is short, or at most twice the shortest."""
    ordered = sequences[np.argsort(context_lens[sequences], kind="stable")]
    parts: list[Indices] = []
    while len(ordered):
        limit = max(SHORT, 2 * int(context_lens[ordered[0]]))
        count = int(np.searchsorted(context_lens[ordered], limit, side="right"))
        parts.append(np.sort(ordered[:count]))
        ordered = ordered[count:]
    return parts
