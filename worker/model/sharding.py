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
    """One rank's part of a model: half-open ranges, a `config` of just that part, and the `whole` model's."""

    kv_heads: Span
    query_heads: Span
    features: Span
    vocabulary: Span
    head_dim: int
    config: PreTrainedConfig
    whole: PreTrainedConfig

    def part(self, name: str, style: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where this rank's part lies in the base model's weight `name` of whole `shape`; `style` is its layer's.

        Raises UnsupportedModel where `shape` is not what the configuration says.
        """
        everything = tuple(slice(None) for _ in shape)
        if style == WHOLE or (style == ROW and len(shape) == 1):  # that one is a bias, added after the sum
            return everything
        (start, stop), total = self._span(name)
        divided = 0 if style == COLUMN else 1
        if shape[divided] != total:
            raise UnsupportedModel(f"{self.whole.model_type}: {name} is {shape}, without an edge of {total}")
        return (*everything[:divided], slice(start, stop), *everything[divided + 1 :])

    def _span(self, name: str) -> tuple[Span, int]:
        """This rank's range of the divided edge, and that edge's whole length."""
        owner, layer = name.rsplit(".", 3)[-3:-1]
        if "attn" not in owner and "attention" not in owner:
            return self.features, self.whole.intermediate_size
        if layer in ("k_proj", "v_proj"):
            heads, total = self.kv_heads, kv_heads_of(self.whole)
        else:
            heads, total = self.query_heads, self.whole.num_attention_heads
        return (heads[0] * self.head_dim, heads[1] * self.head_dim), total * self.head_dim


def shard_of(config: PreTrainedConfig, rank: int, world_size: int) -> Shard:
    """Raises UnsupportedModel where `config` has no plan that we can follow."""
    _check_plan(config)
    heads, groups = config.num_attention_heads, kv_heads_of(config)
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
    return Shard(kv_heads, query_heads, features, vocabulary, head_dim, own, config)


def kv_heads_of(config: PreTrainedConfig) -> int:
    """Where a configuration does not say, each query head has its own."""
    count: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return count


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
