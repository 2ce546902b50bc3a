"""From a plan's chunks to one forward's input."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from worker.core.sequences import Sequence
from worker.core.types import Batch, PageId


@dataclass(frozen=True, slots=True)
class ChunkOf:
    """Positions [start, stop) of `sequence` are computed in this step; `sample`: the last one's logits are wanted."""

    sequence: Sequence
    start: int
    stop: int
    sample: bool


def batch_of(chunks: Ordered[ChunkOf], copies: Ordered[tuple[PageId, PageId]], block: int) -> Batch | None:
    """The chunks in their order, one row of the page table each; None without any. `copies`: (source, target) pages."""
    if not chunks:
        return None
    firsts = np.array([chunk.start for chunk in chunks], np.int32)
    stops = np.array([chunk.stop for chunk in chunks], np.int32)
    counts = stops - firsts
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    widths = (-(-stops // block)).tolist()
    table = np.full((len(chunks), max(widths)), -1, np.int32)
    for row, (chunk, width) in enumerate(zip(chunks, widths, strict=True)):
        table[row, :width] = chunk.sequence.pages.view[:width]
    rows = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(starts[-1], dtype=np.int32) + (firsts - starts[:-1])[rows]
    sampled = [row for row, chunk in enumerate(chunks) if chunk.sample]
    return Batch(
        token_ids=np.concatenate([chunk.sequence.token_slice(chunk.start, chunk.stop) for chunk in chunks]),
        positions=positions,
        slots=table[rows, positions // block].astype(np.int64) * block + positions % block,
        query_starts=starts,
        context_lens=stops,
        page_table=table,
        sample_rows=starts[1:][sampled] - 1,
        sample_requests=tuple(chunks[row].sequence.key for row in sampled),
        page_copies=tuple(copies),
    )
