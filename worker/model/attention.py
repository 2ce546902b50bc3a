"""Our attention behind transformers' `AttentionInterface`.

One `StepAttention` lives for one forward and is handed to the layers as the keyword argument `step`. No mask function
is registered beside it, and so transformers builds none.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from worker.core.types import Batch
from worker.model.sharding import UnsupportedModel

NAME = "kinroute_paged"
HARMLESS = {"dropout", "position_ids", "use_cache", "cache", "is_causal", "output_attentions", "output_hidden_states"}
"""What layers hand on that changes nothing here."""


class StepAttention(Protocol):
    """What the layers of one forward share: where new keys and values go, and which pages each sequence reads."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Write `layer`'s new keys and values into the pool, then attend causally over each sequence's pages.

        q: [T, Hq, D]; k, v: [T, Hkv, D]; scores are multiplied by `scale`; with a `window`, a token sees itself and the
        `window - 1` before. Returns [T, Hq, D].
        """


def step_attention(batch: Batch, pool: Tensor) -> StepAttention:
    """The one for `pool`'s device; `pool`: [P, L, 2, Hkv, B, D]."""
    if pool.device.type == "cuda":
        # Triton is there only with CUDA builds of torch.
        from worker.model.attention_triton import TritonAttention

        return TritonAttention(batch, pool)
    from worker.model.attention_gathered import GatheredAttention

    return GatheredAttention(batch, pool)


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers."""
    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: StepAttention,
    scaling: float,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' side: query [1, Hq, T, D], key and value [1, Hkv, T, D]; returns [1, T, Hq, D]."""
    foreign = sorted(name for name, option in options.items() if option is not None and name not in HARMLESS)
    if foreign or attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} asks for {', '.join(foreign) or 'a mask'} in its attention")
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return step.attend(layer, q, k, v, scaling, sliding_window)[None], None
