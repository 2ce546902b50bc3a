"""The shape of one rank's KV memory."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`num_kv_heads` counts the whole model's; this rank holds `[head_start, head_stop)` of them."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: str
    head_start: int
    head_stop: int

    @property
    def heads(self) -> int:
        return self.head_stop - self.head_start

    @property
    def page_bytes(self) -> int:
        per_token = self.num_layers * 2 * self.heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return per_token * self.tokens_per_block

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        return (num_pages, self.num_layers, 2, self.heads, self.tokens_per_block, self.head_dim)
