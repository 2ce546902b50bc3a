"""What a step computes, as far as its costs depend on it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worker.core.types import Batch


class StepLoad(NamedTuple):
    """Tokens that it computes, and for all of them together the tokens of context that each looks at, with itself."""

    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_tokens: int = 0
    decode_context: int = 0


def load_of(batch: Batch) -> StepLoad:
    """Of one forward; a request's only token counts as decoded."""
    counts, contexts = np.diff(batch.query_starts).astype(np.int64), batch.context_lens.astype(np.int64)
    looked_at = counts * (2 * contexts - counts + 1) // 2
    decodes = counts == 1
    num_decodes, decode_context = int(decodes.sum()), int(looked_at[decodes].sum())
    return StepLoad(int(counts.sum()) - num_decodes, int(looked_at.sum()) - decode_context, num_decodes, decode_context)
