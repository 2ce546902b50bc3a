"""Paged attention for CUDA: one kernel for prefill and decode that reads the pages where they lie.

A program answers for some tokens of one sequence and one KV head: the query heads of that group are stacked as rows, so
that a decoding token still fills a tile. It walks the context tile by tile with a running softmax, from the first
position that the window lets it see to its last token's own.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.core.types import Batch
from worker.model.kv_writing import KvWriter

MIN_TILE = 16
"""The tensor cores' least edge."""
PREFILL_ROWS = 64
CONTEXT_TILE = 64


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    out_ptr,
    q_ptr,
    pool_ptr,
    table_ptr,
    sequence_ptr,
    first_ptr,
    starts_ptr,
    lens_ptr,
    scale,
    window,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    page_stride,
    value_offset,
    head_stride,
    table_stride,
    group: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    dim_tile: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(sequence_ptr + program)
    first = tl.load(first_ptr + program)
    start = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - start
    context = tl.load(lens_ptr + sequence)

    row = tl.arange(0, rows)
    token = first + row // group
    valid = (row < tokens * group) & (token < new)
    position = context - new + token
    head = kv_head * group + row % group
    dim = tl.arange(0, dim_tile)
    inside = dim < width
    at = (start + token).to(tl.int64)
    q_at = at[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None] & inside[None, :], other=0.0)

    best = tl.full([rows], float("-inf"), dtype=tl.float32)
    total = tl.zeros([rows], dtype=tl.float32)
    answer = tl.zeros([rows, dim_tile], dtype=tl.float32)
    first_seen = tl.maximum(context - new + first - window + 1, 0)
    stop = tl.minimum(context - new + first + tokens, context)
    for at_tile in range(first_seen // tile * tile, stop, tile):
        column = at_tile + tl.arange(0, tile)
        exists = column < stop
        page = tl.load(table_ptr + sequence * table_stride + column // block, mask=exists, other=0).to(tl.int64)
        lies = page * page_stride + kv_head * head_stride + (column % block) * width
        k_at = lies[None, :] + dim[:, None]
        k = tl.load(pool_ptr + k_at, mask=exists[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        seen = (column[None, :] <= position[:, None]) & (column[None, :] > position[:, None] - window)
        scores = tl.where(seen & exists[None, :], scores, float("-inf"))
        # A tile may lie wholly before a row's window: its maximum stays -inf, and nothing may become NaN.
        higher = tl.maximum(best, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(best - anchor)
        total = total * shrink + tl.sum(weights, 1)
        v_at = value_offset + lies[:, None] + dim[None, :]
        v = tl.load(pool_ptr + v_at, mask=exists[:, None] & inside[None, :], other=0.0)
        answer = answer * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher

    answer = answer / tl.where(valid, total, 1.0)[:, None]
    out_at = at[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out_ptr + out_at, answer.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])


class TritonAttention:
    def __init__(self, batch: Batch, pool: Tensor) -> None:
        """`pool`: [P, L, 2, Hkv, B, D], contiguous."""
        self._pool = pool
        self._writer = KvWriter(batch.slots, pool)
        self._new = np.diff(batch.query_starts)
        self._table = torch.from_numpy(batch.page_table).to(pool.device)
        self._starts = torch.from_numpy(batch.query_starts).to(pool.device)
        self._lens = torch.from_numpy(batch.context_lens).to(pool.device)
        self._whole = int(batch.context_lens.max(initial=1))
        self._programs: tuple[int, Tensor, Tensor] | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self._writer.write(layer, k, v)
        _, _, _, kv_heads, block, dim = self._pool.shape
        assert q.stride(2) == 1
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        group = q.shape[1] // kv_heads
        rows = self._rows(group)
        tokens, sequences, firsts = self._cut(rows // group)
        pages = self._pool[:, layer]
        _attend[(len(sequences), kv_heads)](
            out,
            q,
            pages,
            self._table,
            sequences,
            firsts,
            self._starts,
            self._lens,
            scale,
            self._whole if window is None else window,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            pages.stride(0),
            pages.stride(1),
            pages.stride(2),
            self._table.stride(0),
            group=group,
            tokens=tokens,
            rows=rows,
            tile=max(MIN_TILE, CONTEXT_TILE if q.element_size() == 2 else CONTEXT_TILE // 2),
            block=block,
            width=dim,
            dim_tile=max(MIN_TILE, _power_of_2(dim)),
        )
        return out

    def _rows(self, group: int) -> int:
        """Rows of a program's tile: enough for the longest sequence's new tokens, within bounds."""
        needed = _power_of_2(int(self._new.max()) * group)
        return max(MIN_TILE, _power_of_2(group), min(PREFILL_ROWS, needed))

    def _cut(self, tokens: int) -> tuple[int, Tensor, Tensor]:
        """Each program's sequence and its first new token there, cut into pieces of `tokens`."""
        if self._programs is None or self._programs[0] != tokens:
            pieces = -(-self._new // tokens)
            sequences = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
            order = np.arange(len(sequences)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            device = self._pool.device
            self._programs = (
                tokens,
                torch.from_numpy(sequences).to(device),
                torch.from_numpy((order * tokens).astype(np.int32)).to(device),
            )
        return self._programs


def _power_of_2(number: int) -> int:
    """The least one that is not below `number`."""
    return 1 << (number - 1).bit_length()
