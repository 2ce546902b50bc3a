"""A rank's memory layout in the words of a handoff."""

from __future__ import annotations

from worker.core.handoff import KvShape
from worker.memory.layout import KvLayout


def shape_of(layout: KvLayout) -> KvShape:
    return KvShape(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        tokens_per_block=layout.tokens_per_block,
        dtype=layout.dtype,
    )
