"""Builds one rank's model from a Hugging Face folder: transformers' code, this rank's weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedConfig

from worker.core.shards import split_evenly
from worker.model import attention
from worker.model.communicator import Communicator
from worker.model.sharding import Shard, UnsupportedModel, parallelise, shard_of, style_of

Progress = Callable[[float], None]
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What others must know of a model. `num_kv_heads` counts all ranks'."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    kv_heads: tuple[int, int]
    head_dim: int
    vocab_size: int
    max_context_length: int
    eos_token_ids: frozenset[int]
    dtype: str


@dataclass(slots=True)
class LoadedModel:
    """`base` yields hidden states [1, T, H]; `head` [V of this rank, H] turns them into this rank's logits."""

    facts: ModelFacts
    base: nn.Module
    head: Tensor


def load(
    folder: Path, communicator: Communicator, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> LoadedModel:
    """Raises UnsupportedModel; an unreadable folder raises OSError."""
    config = AutoConfig.from_pretrained(folder)
    shard = shard_of(config, communicator.rank, communicator.world_size)
    attention.register()
    with torch.device("meta"):
        base = AutoModel.from_config(shard.config, attn_implementation=attention.NAME, dtype=dtype)
    weights = _Weights(folder)
    names = [name for name, _ in base.named_parameters()]
    for done, name in enumerate(names):
        stored = weights.find(name)
        whole = weights.shape(stored)
        part = weights.read(stored, shard.part(name, style_of(config, name), whole))
        _replace(base, name, part.to(device=device, dtype=dtype))
        if progress is not None:
            progress((done + 1) / len(names))
    _make_buffers(base, shard.config, device)
    head = _head(config, base, weights, communicator).to(device=device, dtype=dtype)
    parallelise(base, config, communicator)
    base.eval()
    return LoadedModel(_facts(folder, config, shard, dtype), base, head)


def _replace(base: nn.Module, name: str, value: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module = base.get_submodule(owner)
    expected = getattr(module, own).shape
    if expected != value.shape:
        raise UnsupportedModel(f"{name} has shape {tuple(value.shape)} instead of {tuple(expected)}")
    setattr(module, own, nn.Parameter(value, requires_grad=False))


def _make_buffers(base: nn.Module, config: PreTrainedConfig, device: torch.device) -> None:
    """Buffers that no file holds (rotary frequencies) are computed by making their module again, on `device`."""
    for name, module in list(base.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            owner, _, own = name.rpartition(".")
            with torch.device(device):
                setattr(base.get_submodule(owner), own, type(module)(config=config))


def _head(config: PreTrainedConfig, base: nn.Module, weights: _Weights, communicator: Communicator) -> Tensor:
    start, stop = split_evenly(config.vocab_size, communicator.world_size)[communicator.rank]
    if config.tie_word_embeddings:
        return base.get_parameter(EMBEDDING)[start:stop]
    return weights.read(HEAD, (slice(start, stop), slice(None)))


def _facts(folder: Path, config: PreTrainedConfig, shard: Shard, dtype: torch.dtype) -> ModelFacts:
    ends: set[int] = set()
    sources = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    for ids in sources:
        ends |= set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
    return ModelFacts(
        architecture=config.model_type,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        kv_heads=shard.kv_heads,
        head_dim=shard.head_dim,
        vocab_size=config.vocab_size,
        max_context_length=config.max_position_embeddings,
        eos_token_ids=frozenset(ends),
        dtype=str(dtype).removeprefix("torch."),
    )


class _Weights:
    """The safetensors files of a folder, one or several behind an index."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif (folder / "model.safetensors").is_file():
            single = folder / "model.safetensors"
            with safe_open(single, "pt") as file:
                files = dict.fromkeys(file.keys(), single)
        else:
            raise UnsupportedModel(f"{folder} has no model.safetensors")
        self._files = files
        self._open = {path: safe_open(path, "pt") for path in set(files.values())}

    def find(self, name: str) -> str:
        """The stored name of a base model's weight."""
        for stored in (f"model.{name}", name):
            if stored in self._files:
                return stored
        raise UnsupportedModel(f"the model's files lack the weight {name}")

    def shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._open[self._files[stored]].get_slice(stored).get_shape())

    def read(self, stored: str, part: tuple[slice, ...]) -> Tensor:
        if stored not in self._files:
            raise UnsupportedModel(f"the model's files lack the weight {stored}")
        file = self._open[self._files[stored]]
        if all(piece == slice(None) for piece in part):
            whole: Tensor = file.get_tensor(stored)
            return whole
        sliced: Tensor = file.get_slice(stored)[part]
        return sliced.contiguous()
