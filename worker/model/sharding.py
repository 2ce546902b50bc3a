"""Which part of each weight a rank holds.

A rank's model is transformers' own, built from a configuration with this rank's numbers of heads and features; so a
weight's part is found by holding its two shapes against each other, and the model's `base_model_tp_plan` says which
layers' outputs must be summed over the ranks. Heads are divided by KV group, unevenly where they do not divide.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from worker.core.shards import kv_head_ranges, split_evenly
from worker.model.communicator import Communicator

COLUMN, ROW = "colwise", "rowwise"
REPLICATED = {"replicated_with_grad_allreduce", "replicated"}


class UnsupportedModel(Exception):
    """Raised when a model folder cannot be served; the message names the architecture and what it lacks."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part: half-open ranges of KV heads, query heads and MLP features, and its configuration."""

    kv_heads: tuple[int, int]
    query_heads: tuple[int, int]
    features: tuple[int, int]
    head_dim: int
    config: PreTrainedConfig

    def part(self, name: str, style: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where this rank's part of the weight `name` (its whole `shape`) lies; `style` is the plan's word for it."""
        if style in REPLICATED:
            return tuple(slice(None) for _ in shape)
        start, stop = self._range(name)
        if style == COLUMN:
            return (slice(start, stop), *(slice(None) for _ in shape[1:]))
        return (slice(None), slice(start, stop)) if len(shape) == 2 else (slice(None),)

    def _range(self, name: str) -> tuple[int, int]:
        layer = name.rsplit(".", 2)[-2]
        if layer in ("k_proj", "v_proj"):
            first, last = self.kv_heads
        elif layer in ("q_proj", "o_proj"):
            first, last = self.query_heads
        else:
            return self.features
        return first * self.head_dim, last * self.head_dim


def shard_of(config: PreTrainedConfig, rank: int, world_size: int) -> Shard:
    """Raises UnsupportedModel where `config` has no plan that we can follow."""
    architecture = config.model_type
    plan = config.base_model_tp_plan
    if not plan:
        raise UnsupportedModel(f"{architecture} has no tensor-parallel plan in transformers")
    unknown = sorted({style for style in plan.values() if style not in REPLICATED | {COLUMN, ROW}})
    if unknown:
        raise UnsupportedModel(f"{architecture} needs the tensor-parallel styles {', '.join(unknown)}")
    try:
        kv_heads = kv_head_ranges(config.num_key_value_heads, world_size)[rank]
    except ValueError as error:
        raise UnsupportedModel(f"{architecture}: {error}") from error
    group = config.num_attention_heads // config.num_key_value_heads
    query_heads = (kv_heads[0] * group, kv_heads[1] * group)
    features = split_evenly(config.intermediate_size, world_size)[rank]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = copy.deepcopy(config)
    own.head_dim = head_dim
    own.num_key_value_heads = kv_heads[1] - kv_heads[0]
    own.num_attention_heads = query_heads[1] - query_heads[0]
    own.intermediate_size = features[1] - features[0]
    return Shard(kv_heads, query_heads, features, head_dim, own)


def style_of(config: PreTrainedConfig, name: str) -> str:
    """The plan's style for the weight `name` of the base model (`layers.0.mlp.up_proj.weight`); what the plan leaves
    out every rank holds whole."""
    layer = name.rsplit(".", 1)[0]
    for pattern, style in config.base_model_tp_plan.items():
        if fnmatchcase(layer, pattern):
            return str(style)
    return "replicated"


class RowParallel(nn.Module):
    """A linear layer of which every rank holds some input features: outputs are summed, then the bias is added once."""

    def __init__(self, whole: nn.Linear, communicator: Communicator) -> None:
        super().__init__()
        self.weight = whole.weight
        self.bias = whole.bias
        self._communicator = communicator

    def forward(self, states: Tensor) -> Tensor:
        partial = linear(states, self.weight)
        self._communicator.all_reduce(partial)
        return partial if self.bias is None else partial + self.bias


def parallelise(base: nn.Module, config: PreTrainedConfig, communicator: Communicator) -> None:
    """Replace the row-parallel layers of `base`, as the plan names them."""
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and style_of(config, f"{name}.weight") == ROW:
            parent, _, own = name.rpartition(".")
            setattr(base.get_submodule(parent), own, RowParallel(module, communicator))


def no_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
