from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, SmolLM3Config

from worker.model.sharding import COLUMN, ROW, WHOLE, Shard, UnsupportedModel, shard_of, style_of

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 50, "num_hidden_layers": 1, "vocab_size": 20}
CONFIGS: list[PreTrainedConfig] = [
    LlamaConfig(num_attention_heads=6, num_key_value_heads=3, attention_bias=True, mlp_bias=True, **SIZES),
    Qwen3Config(num_attention_heads=8, num_key_value_heads=4, head_dim=16, **SIZES),
    LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **SIZES),
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.model_type}{config.num_key_value_heads}")
def test_each_number_of_a_divided_weight_lies_on_one_rank(config: PreTrainedConfig, world_size: int) -> None:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config).base_model
    shards = [shard_of(config, rank, world_size) for rank in range(world_size)]

    for name, weight in whole.named_parameters():
        style = style_of(config, name.rpartition(".")[0])
        held = torch.zeros(weight.shape)
        for shard in shards:
            held[shard.part(name, style, tuple(weight.shape))] += 1
        replicated = style == WHOLE or (style == ROW and weight.ndim == 1)
        assert torch.all(held == (world_size if replicated else 1)), name


def test_query_heads_go_with_their_kv_head() -> None:
    # SmolLM2's: 9 query heads over 3 KV heads.
    config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)

    first, second = (shard_of(config, rank, 2) for rank in range(2))

    assert (first.kv_heads, first.query_heads) == ((0, 2), (0, 6))
    assert (second.kv_heads, second.query_heads) == ((2, 3), (6, 9))
    assert second.part("layers.0.self_attn.o_proj.weight", ROW, (576, 576)) == (slice(None), slice(384, 576))
    assert second.part("layers.0.self_attn.k_proj.weight", COLUMN, (192, 576)) == (slice(128, 192), slice(None))


def test_features_and_vocabulary_are_split_as_evenly_as_they_can_be() -> None:
    config = LlamaConfig(**SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3})
    shards = [shard_of(config, rank, 3) for rank in range(3)]

    assert [shard.features for shard in shards] == [(0, 17), (17, 34), (34, 50)]
    assert [shard.vocabulary for shard in shards] == [(0, 7), (7, 14), (14, 20)]


def test_the_callers_configuration_stays_as_it_was() -> None:
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)

    shard: Shard = shard_of(config, 1, 2)

    assert (shard.config.num_attention_heads, shard.config.num_key_value_heads) == (2, 1)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)


def test_a_weight_of_another_size_than_the_configuration_says_is_refused() -> None:
    shard = shard_of(LlamaConfig(intermediate_size=50), 0, 2)

    with pytest.raises(UnsupportedModel, match=r"up_proj.weight is \(60, 8\), without an edge of 50"):
        shard.part("layers.0.mlp.up_proj.weight", COLUMN, (60, 8))


def test_layers_that_share_keys_are_refused() -> None:
    config = SmolLM3Config()
    config.num_kv_shared_layers = 2

    with pytest.raises(UnsupportedModel, match="smollm3 shares keys and values between layers"):
        shard_of(config, 0, 1)
