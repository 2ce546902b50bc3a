"""From what a request asks for its blocks to priorities by block."""

from __future__ import annotations

from worker.core.sequences import Worth
from worker.core.types import DEFAULT_PRIORITY, Retention


def worth_of(retention: Retention | None, prompt_tokens: int, block: int) -> tuple[Worth, ...]:
    """By rising first block; a block goes by the token that it begins with. Empty: the default for all.

    Where ranges overlap the later one wins. The block that the prompt ends in is the prompt's.
    """
    if retention is None:
        return ()
    prompt_blocks = -(-prompt_tokens // block)
    edges = {0, prompt_blocks}
    spans: list[tuple[int, int, int, int]] = []
    for one in retention.ranges:
        stop = prompt_tokens if one.stop is None else min(one.stop, prompt_tokens)
        first, last = -(-one.start // block), -(-stop // block)
        if first < last:
            spans.append((first, last, one.priority, one.duration_ms))
            edges |= {first, last}
    worth: list[Worth] = []
    for first in sorted(edges):
        kept = (DEFAULT_PRIORITY, 0)
        if first >= prompt_blocks:
            kept = (retention.decode_priority, retention.decode_duration_ms)
        else:
            for start, stop, priority, duration_ms in spans:
                if start <= first < stop:
                    kept = (priority, duration_ms)
        if not worth or worth[-1][1:] != kept:
            worth.append((first, *kept))
    return () if worth == [(0, DEFAULT_PRIORITY, 0)] else tuple(worth)
