"""Builds one rank's model from a Hugging Face folder: transformers' code, this rank's weights, our layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from worker.model import attention, rehearsal
from worker.model.checkpoint import Checkpoint
from worker.model.communicator import Communicator
from worker.model.facts import ModelFacts, facts_of
from worker.model.layers import RowParallel, pack, replace
from worker.model.sharding import ROW, Shard, UnsupportedModel, shard_of, style_of

Progress = Callable[[float], None]


@dataclass(slots=True)
class LoadedModel:
    """`module` maps ids [1, T] to logits [1, R, V of this rank]; `vocabulary` has every rank's part of V."""

    facts: ModelFacts
    module: nn.Module
    vocabulary: list[int]


def load(
    folder: Path, communicator: Communicator, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> LoadedModel:
    """Reads only this rank's parts. `progress` hears of the share done, 0 to 1.

    Raises UnsupportedModel; an unreadable folder raises OSError.
    """
    config = _read_config(folder)
    rank, world_size = communicator.rank, communicator.world_size
    shards = [shard_of(config, other, world_size) for other in range(world_size)]
    shard = shards[rank]
    attention.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shard.config, attn_implementation=attention.NAME, dtype=dtype)
    model.eval()
    rehearsal.check(model, shard)
    _make_buffers(model, device)
    _Filling(config, shard, model, Checkpoint(folder), device, dtype).run(progress or _ignore)
    if world_size > 1:
        _sum_over_ranks(model, config, communicator)
    if device.type == "cpu":
        pack(model)
    spans = [other.vocabulary for other in shards]
    facts = facts_of(folder, config, shard, str(dtype).removeprefix("torch."))
    return LoadedModel(facts, model, [stop - start for start, stop in spans])


def _ignore(_: float) -> None:
    return


def _read_config(folder: Path) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except ValueError as error:
        raise UnsupportedModel(f"{folder}: {error}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(f"{config.model_type} is no causal language model in transformers")
    return config


def _make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that no file holds (rotary frequencies) get their values as transformers gives them on loading."""
    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in names:
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.empty_like(module.get_buffer(name), device=device), persistent)
        if names:
            model._init_weights(module)


@dataclass(slots=True)
class _Filling:
    """Puts this rank's part of each weight into the model, which is on the meta device until then."""

    config: PreTrainedConfig
    shard: Shard
    model: PreTrainedModel
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype

    def run(self, progress: Progress) -> None:
        base = self.model.base_model
        head = self.model.get_output_embeddings()
        names = [name for name, _ in base.named_parameters()]
        for done, name in enumerate(names):
            stored = self._stored(name)
            shape = self.checkpoint.shape(stored)
            style = style_of(self.config, name.rpartition(".")[0])
            self._put(base, name, self._read(stored, self.shard.part(name, style, shape)))
            progress(done / len(names))
        self._fill_head(head)
        progress(1.0)

    def _fill_head(self, head: nn.Linear) -> None:
        rows = slice(*self.shard.vocabulary)
        name = next(name for name, module in self.model.named_modules() if module is head)
        if self.config.tie_word_embeddings:
            embedding: Tensor = self.model.get_input_embeddings().weight
            head.weight = nn.Parameter(embedding[rows], requires_grad=False)
        else:
            head.weight = nn.Parameter(self._read(f"{name}.weight", (rows, slice(None))), requires_grad=False)
        if head.bias is not None:
            head.bias = nn.Parameter(self._read(f"{name}.bias", (rows,)), requires_grad=False)

    def _read(self, stored: str, part: tuple[slice, ...]) -> Tensor:
        return self.checkpoint.read(stored, part).to(device=self.device, dtype=self.dtype)

    def _stored(self, name: str) -> str:
        """Folders of a base model alone leave out the prefix."""
        prefixed = f"{self.model.base_model_prefix}.{name}"
        return prefixed if prefixed in self.checkpoint or name not in self.checkpoint else name

    def _put(self, base: nn.Module, name: str, value: Tensor) -> None:
        owner, _, own = name.rpartition(".")
        module = base.get_submodule(owner)
        expected = tuple(getattr(module, own).shape)
        if expected != tuple(value.shape):
            raise UnsupportedModel(
                f"{self.config.model_type}: this rank's part of {name} is {tuple(value.shape)}, not {expected}"
            )
        setattr(module, own, nn.Parameter(value, requires_grad=False))


def _sum_over_ranks(model: PreTrainedModel, config: PreTrainedConfig, communicator: Communicator) -> None:
    base = model.base_model
    for name, layer in list(base.named_modules()):
        if style_of(config, name) == ROW:
            replace(base, name, RowParallel(layer, communicator))
