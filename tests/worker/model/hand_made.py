"""Batches made by hand: sequences whose pages the test chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.core.types import Batch, PageId, RequestKey


@dataclass(frozen=True)
class Piece:
    """The tokens [start, start + len(token_ids)) of a sequence that lies in `pages`."""

    token_ids: list[int]
    start: int
    pages: list[int]
    sampled: bool = True

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def make_batch(pieces: list[Piece], tokens_per_block: int, page_copies: tuple[tuple[int, int], ...] = ()) -> Batch:
    """One step over `pieces`; each sampled one wants the logits of its last token, under its index as key."""
    positions = [at for piece in pieces for at in range(piece.start, piece.stop)]
    slots = [
        piece.pages[at // tokens_per_block] * tokens_per_block + at % tokens_per_block
        for piece in pieces
        for at in range(piece.start, piece.stop)
    ]
    starts = np.cumsum([0, *(len(piece.token_ids) for piece in pieces)])
    table = np.full((len(pieces), max(len(piece.pages) for piece in pieces)), -1, np.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.pages)] = piece.pages
    sampled = [number for number, piece in enumerate(pieces) if piece.sampled]
    return Batch(
        token_ids=np.array([token for piece in pieces for token in piece.token_ids], np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int64),
        query_starts=starts.astype(np.int32),
        context_lens=np.array([piece.stop for piece in pieces], np.int32),
        page_table=table,
        sample_rows=np.array([starts[number + 1] - 1 for number in sampled], np.int32),
        sample_requests=tuple(RequestKey(number) for number in sampled),
        page_copies=tuple((PageId(source), PageId(target)) for source, target in page_copies),
    )
