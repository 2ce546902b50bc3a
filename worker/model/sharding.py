"""Which part of each weight a rank holds.

A rank's model is transformers' own, built from a configuration with this rank's numbers of heads and features. The
model's `base_model_tp_plan` says which layers are divided: column-parallel ones by output, row-parallel ones by input,
whose outputs must be summed over the ranks. Heads are divided by KV group, unevenly where they do not divide.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase

from transformers import PreTrainedConfig

from worker.core.shards import kv_head_ranges, split_evenly

COLUMN, ROW = "colwise", "rowwise"
WHOLE = "replicated_with_grad_allreduce"
Span = tuple[int, int]


class UnsupportedModel(Exception):
    """Raised when a model folder cannot be served; the message names the architecture and what is in the way."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model: half-open ranges, and `config`, a configuration of just that part."""

    kv_heads: Span
    query_heads: Span
    features: Span
    vocabulary: Span
    head_dim: int
    config: PreTrainedConfig

    def part(self, name: str, style: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where this rank's part lies in the base model's weight `name` of whole `shape`; `style` is its layer's."""
        whole = tuple(slice(None) for _ in shape)
        if style == WHOLE:
            return whole
        span = slice(*self._span(name, style))
        if style == COLUMN:
            return (span, *whole[1:])
        return (whole[0], span) if len(shape) == 2 else whole  # a bias, added after the sum

    def _span(self, name: str, style: str) -> Span:
        owner, layer = name.rsplit(".", 3)[-3:-1]
        if "attn" not in owner and "attention" not in owner:
            return self.features
        first, last = self.kv_heads if layer in ("k_proj", "v_proj") else self.query_heads
        return first * self.head_dim, last * self.head_dim


def shard_of(config: PreTrainedConfig, rank: int, world_size: int) -> Shard:
    """Raises UnsupportedModel where `config` has no plan that we can follow."""
    _check_plan(config)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    try:
        kv_heads = kv_head_ranges(groups, world_size)[rank]
    except ValueError as error:
        raise UnsupportedModel(f"{config.model_type}: {error}") from error
    query_heads = (kv_heads[0] * heads // groups, kv_heads[1] * heads // groups)
    features = split_evenly(config.intermediate_size, world_size)[rank]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    own = copy.deepcopy(config)
    own.head_dim = head_dim
    own.num_key_value_heads = kv_heads[1] - kv_heads[0]
    own.num_attention_heads = query_heads[1] - query_heads[0]
    own.intermediate_size = features[1] - features[0]
    vocabulary = split_evenly(config.vocab_size, world_size)[rank]
    return Shard(kv_heads, query_heads, features, vocabulary, head_dim, own)


def _check_plan(config: PreTrainedConfig) -> None:
    name = config.model_type
    if not config.base_model_tp_plan:
        raise UnsupportedModel(f"{name} has no tensor-parallel plan (base_model_tp_plan) in transformers")
    foreign = sorted(set(config.base_model_tp_plan.values()) - {COLUMN, ROW, WHOLE})
    if foreign:
        raise UnsupportedModel(f"{name} needs the tensor-parallel styles {', '.join(foreign)}")
    if not isinstance(getattr(config, "intermediate_size", None), int):
        raise UnsupportedModel(f"{name} has layers of different widths")
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModel(f"{name} shares keys and values between layers")


def style_of(config: PreTrainedConfig, layer: str) -> str:
    """The plan's style for `layer` of the base model (`layers.0.mlp.up_proj`); what it leaves out is held whole."""
    for pattern, style in (config.base_model_tp_plan or {}).items():
        if fnmatchcase(layer, pattern):
            return str(style)
    return WHOLE
