from __future__ import annotations

from worker.memory.layout import KvLayout

LAYOUT = KvLayout(
    num_layers=30, num_kv_heads=3, head_dim=64, tokens_per_block=32, dtype="bfloat16", head_start=0, head_stop=2
)


def test_a_page_holds_keys_and_values_of_this_ranks_heads_in_every_layer() -> None:
    assert LAYOUT.shape(5) == (5, 30, 2, 2, 32, 64)
    assert LAYOUT.page_bytes == 30 * 2 * 2 * 32 * 64 * 2
