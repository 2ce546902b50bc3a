"""A forward without memory, before any weight is read: does this architecture come to our attention as we expect?"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from worker.model.sharding import Shard, UnsupportedModel


class _Rehearsal:
    """Stands in for a step's attention and notes which layers come to it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.layers: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        kv_heads = self._shard.config.num_key_value_heads
        expected = (kv_heads, self._shard.head_dim)
        if tuple(k.shape[1:]) != expected or k.shape != v.shape or q.shape[2] != k.shape[2]:
            raise UnsupportedModel(f"layer {layer} of {self._shard.config.model_type} has heads of another shape")
        self.layers.append(layer)
        return torch.empty_like(q)


@torch.inference_mode()
def check(model: PreTrainedModel, shard: Shard) -> None:
    """Run two tokens through `model`, which is on the meta device. Raises UnsupportedModel."""
    rehearsal = _Rehearsal(shard)
    ids = torch.zeros((1, 2), dtype=torch.long, device="meta")
    model(input_ids=ids, position_ids=ids, use_cache=False, step=rehearsal)
    if rehearsal.layers != list(range(shard.config.num_hidden_layers)):
        raise UnsupportedModel(f"{shard.config.model_type} has layers without attention of the usual kind")
