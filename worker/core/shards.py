"""How a tensor-parallel group divides a model's heads and features. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Overlap:
    """KV heads [head_start, head_stop), counted over the whole model, that rank `rank` of a source holds."""

    rank: int
    head_start: int
    head_stop: int


def overlaps(sources: Sequence[tuple[int, int]], wanted: tuple[int, int]) -> list[Overlap]:
    """Where the heads `wanted` are to be had, in rank order; `sources` has one half-open range a rank."""
    found = (Overlap(rank, max(start, wanted[0]), min(stop, wanted[1])) for rank, (start, stop) in enumerate(sources))
    return [overlap for overlap in found if overlap.head_start < overlap.head_stop]
