"""Where KV bytes live and how they move.

Letters: P pages, L layers, B tokens per block, Hkv this rank's KV heads, D head dimension. A page is
[L, 2, Hkv, B, D], contiguous; dim 1 is key then value. A pool is [P, L, 2, Hkv, B, D].
"""
