"""How a tensor-parallel group divides a model's heads and features. Pure."""

from __future__ import annotations

import itertools


def split_evenly(total: int, parts: int) -> list[tuple[int, int]]:
    """Half-open ranges that cover [0, total), sizes differing by at most one, the larger first."""
    size, larger = divmod(total, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(itertools.pairwise(starts))


def kv_head_ranges(num_kv_heads: int, world_size: int) -> list[tuple[int, int]]:
    """Each rank's KV heads; its query heads are those of these groups. Raises ValueError: more ranks than KV heads."""
    if not 1 <= world_size <= num_kv_heads:
        raise ValueError(f"tensor_parallel_size {world_size} must be between 1 and the model's {num_kv_heads} KV heads")
    return split_evenly(num_kv_heads, world_size)
