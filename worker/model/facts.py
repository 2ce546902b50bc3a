"""What the rest of a worker must know of its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from worker.model.sharding import Shard, kv_heads_of


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`num_kv_heads` counts the whole model's; this rank holds `kv_heads`, half-open."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    kv_heads: tuple[int, int]
    head_dim: int
    vocab_size: int
    max_context_length: int
    eos_token_ids: frozenset[int]
    dtype: str


def facts_of(folder: Path, config: PreTrainedConfig, shard: Shard, dtype: str) -> ModelFacts:
    return ModelFacts(
        architecture=config.model_type,
        num_layers=config.num_hidden_layers,
        num_kv_heads=kv_heads_of(config),
        kv_heads=shard.kv_heads,
        head_dim=shard.head_dim,
        vocab_size=config.vocab_size,
        max_context_length=config.max_position_embeddings,
        eos_token_ids=_end_tokens(folder, config),
        dtype=dtype,
    )


def _end_tokens(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Of the configuration and of `generation_config.json`: chat models often name theirs only in the latter."""
    ends = _ids(getattr(config, "eos_token_id", None))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ends |= _ids(json.loads(generation.read_text()).get("eos_token_id"))
    return frozenset(ends)


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {int(value)}
