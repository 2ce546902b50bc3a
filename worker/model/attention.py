"""Paged attention behind transformers' `AttentionInterface`, on any device that has no kernel of its own.

One `StepAttention` lives for one forward. It is handed to the layers as the keyword argument `step`; each layer writes
its new keys and values into the pool, then reads its sequences' pages from there. Pages are gathered by index, one copy
a layer: decoding sequences all together, padded to the longest; prefilling ones one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from worker.core.types import Batch

NAME = "kinroute_paged"


@dataclass(slots=True)
class _Prefill:
    """One sequence with several new tokens: rows [start, stop) of [T], and its pages' row index [Hkv * n]."""

    start: int
    stop: int
    context_len: int
    rows: Tensor


class StepAttention:
    """What the layers of one forward share: where new keys go, which pages each sequence reads, and the masks."""

    def __init__(self, batch: Batch, pool: Tensor) -> None:
        """`pool`: [P, L, 2, Hkv, B, D]."""
        _, self._layers, _, self._heads, self._block, self._dim = pool.shape
        device = pool.device
        self._pool = pool
        self._rows = pool.view(-1, self._block * self._dim)
        slots = torch.from_numpy(batch.slots).to(device)
        self._page, self._offset = slots // self._block, slots % self._block
        lengths = batch.query_starts[1:] - batch.query_starts[:-1]
        table = torch.from_numpy(batch.page_table).to(device).long()
        decoding = [s for s, length in enumerate(lengths) if length == 1]
        self._decode_rows: Tensor | None = None
        self._decode_index: Tensor | None = None
        if decoding:
            longest = max(int(batch.context_lens[s]) for s in decoding)
            pages = table[decoding, : -(-longest // self._block)].clamp_(min=0)
            self._decode_index = self._row_index(pages)
            self._decode_at = torch.tensor([int(batch.query_starts[s]) for s in decoding], device=device)
            self._decode_lens = torch.tensor([int(batch.context_lens[s]) for s in decoding], device=device)
            self._all_decode = len(decoding) == len(lengths)
        self._prefills = [
            _Prefill(
                int(batch.query_starts[s]),
                int(batch.query_starts[s + 1]),
                int(batch.context_lens[s]),
                self._row_index(table[s : s + 1, : -(-int(batch.context_lens[s]) // self._block)]),
            )
            for s, length in enumerate(lengths)
            if length > 1
        ]
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def _row_index(self, pages: Tensor) -> Tensor:
        """Rows of layer 0's keys for `pages` [S, n]: flat [S * Hkv * n], so that a gather yields [S, Hkv, n * B, D]."""
        heads = torch.arange(self._heads, device=pages.device)
        rows = pages[:, None, :] * (self._layers * 2 * self._heads) + heads[None, :, None]
        return rows.reshape(-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q: [T, Hq, D]; k, v: [T, Hkv, D]. Returns [T, Hq, D]."""
        pages = self._pool[:, layer]
        pages[self._page, 0, :, self._offset] = k
        pages[self._page, 1, :, self._offset] = v
        out = torch.empty_like(q)
        if self._decode_index is not None:
            self._decode(layer, q, out, scale, window)
        for number, prefill in enumerate(self._prefills):
            out[prefill.start : prefill.stop] = self._prefill(number, prefill, layer, q, scale, window)
        return out

    def _gather(self, layer: int, index: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [S, Hkv, n * B, D]."""
        first = layer * 2 * self._heads
        shape = (sequences, self._heads, -1, self._dim)
        keys = self._rows[first:].index_select(0, index).view(shape)
        values = self._rows[first + self._heads :].index_select(0, index).view(shape)
        return keys, values

    def _decode(self, layer: int, q: Tensor, out: Tensor, scale: float, window: int | None) -> None:
        assert self._decode_index is not None
        sequences = len(self._decode_at)
        keys, values = self._gather(layer, self._decode_index, sequences)
        key = (-1, window)
        if key not in self._masks:
            positions = torch.arange(keys.shape[2], device=q.device)
            seen = positions < self._decode_lens[:, None]
            if window is not None:
                seen &= positions >= self._decode_lens[:, None] - window
            self._masks[key] = None if bool(seen.all()) else seen[:, None, None, :]
        queries = q if self._all_decode else q[self._decode_at]
        # A KV head's query heads stand in as its query positions: all of them see the same keys.
        grouped = queries.view(sequences, self._heads, -1, self._dim)
        answer = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._masks[key], scale=scale)
        flat = answer.reshape(sequences, -1, self._dim)
        if self._all_decode:
            out.copy_(flat)
        else:
            out[self._decode_at] = flat

    def _prefill(
        self, number: int, prefill: _Prefill, layer: int, q: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys, values = self._gather(layer, prefill.rows, 1)
        keys, values = keys[:, :, : prefill.context_len], values[:, :, : prefill.context_len]
        new = prefill.stop - prefill.start
        whole = new == prefill.context_len and (window is None or window >= new)
        key = (number, window)
        if not whole and key not in self._masks:
            at = torch.arange(prefill.context_len - new, prefill.context_len, device=q.device)[:, None]
            positions = torch.arange(prefill.context_len, device=q.device)
            seen = positions <= at
            if window is not None:
                seen &= positions > at - window
            self._masks[key] = seen
        queries = q[prefill.start : prefill.stop].transpose(0, 1)[None]
        groups = queries.shape[1] // self._heads
        if groups > 1:
            keys = keys.repeat_interleave(groups, 1)
            values = values.repeat_interleave(groups, 1)
        mask = None if whole else self._masks[key]
        answer = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=whole, scale=scale)
        return answer[0].transpose(0, 1)


def _paged(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    step: StepAttention,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' side: query [1, Hq, T, D], key and value [1, Hkv, T, D]; returns [1, T, Hq, D]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return step.attend(layer, q, k, v, scaling, sliding_window)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers; no mask is built for it."""
    AttentionInterface.register(NAME, _paged)
    AttentionMaskInterface.register(NAME, _no_mask)
