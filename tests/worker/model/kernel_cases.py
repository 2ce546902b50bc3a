"""Runs the CUDA attention over many batches and prints, as JSON, how far it is from torch's own in each.

A program of its own, as Triton decides at import whether it interprets: `TRITON_INTERPRET=1 python -m ... cpu`.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass

import torch

from tests.worker.model.hand_made import Piece, make_batch
from worker.model.attention_gathered import GatheredAttention
from worker.model.attention_triton import TritonAttention

NUM_PAGES, LAYERS = 24, 2


@dataclass(frozen=True)
class Case:
    """`spans`: each sequence's new tokens [start, stop).

    `half` is bfloat16 on a GPU; Triton's interpreter multiplies that wrongly, and float16 stands in.
    """

    spans: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (6, 2)
    dim: int = 16
    block: int = 16
    window: int | None = None
    half: bool = False


CASES = {
    "a whole prompt": Case(spans=((0, 37),)),
    "a prompt of one token": Case(spans=((0, 1),)),
    "a chunk inside a page": Case(spans=((19, 50),)),
    "decoding": Case(spans=((63, 64), (0, 1), (16, 17), (90, 91))),
    "all at once": Case(spans=((63, 64), (0, 40), (7, 45), (15, 16))),
    "a window": Case(spans=((0, 70), (5, 60), (80, 81)), window=9),
    "a window of one token": Case(spans=((0, 20), (40, 41)), window=1),
    "a window larger than all": Case(spans=((0, 20), (40, 41)), window=4096),
    "a query head per KV head": Case(spans=((0, 40), (50, 51)), heads=(3, 3)),
    "many query heads per KV head": Case(spans=((0, 9), (50, 51)), heads=(20, 1)),
    "a dimension that is no power of two": Case(spans=((0, 40), (50, 51)), dim=24),
    "blocks larger than a tile": Case(spans=((0, 70), (100, 101)), block=128),
    "small blocks": Case(spans=((0, 13), (20, 21)), block=2),
    "half precision": Case(spans=((0, 40), (70, 71), (10, 30)), dim=64, block=32, half=True),
}


def difference(case: Case, device: torch.device) -> float:
    """The largest, over the answers and the pool; NaN where either has one."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    dtype = half if case.half else torch.float32
    torch.manual_seed(1)
    rng = random.Random(2)
    query_heads, kv_heads = case.heads
    free = rng.sample(range(NUM_PAGES), NUM_PAGES)
    pieces = []
    for start, stop in case.spans:
        pages = [free.pop() for _ in range(-(-stop // case.block))]
        pieces.append(Piece([0] * (stop - start), start, pages))
    batch = make_batch(pieces, case.block)
    count = len(batch.token_ids)
    pool = torch.randn(NUM_PAGES, LAYERS, 2, kv_heads, case.block, case.dim, device=device).to(dtype)
    # As the model hands it over: heads before tokens in memory's order.
    q = torch.randn(count, query_heads, case.dim, device=device).to(dtype)
    k, v = torch.randn(2, count, kv_heads, case.dim, device=device).to(dtype)
    answers, pools = [], []
    for kind in (GatheredAttention, TritonAttention):
        own = pool.clone()
        attention = kind(batch, own)
        answers += [attention.attend(layer, q, k, v, 0.3, case.window).float() for layer in range(LAYERS)]
        pools.append(own.float())
    return max(
        float((ours - theirs).abs().max())
        for ours, theirs in ((answers[0], answers[2]), (answers[1], answers[3]), pools)
    )


if __name__ == "__main__":
    device = torch.device(sys.argv[1])
    json.dump({name: difference(case, device) for name, case in CASES.items()}, sys.stdout)
