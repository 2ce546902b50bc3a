from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import make_tiny_model
from tests.worker.model.hand_made import Piece, make_batch
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.model.communicator import SoloCommunicator
from worker.model.loader import LoadedModel, load
from worker.model.runner import ModelRunner
from worker.model.sharding import UnsupportedModel

CPU = torch.device("cpu")
PROMPT = [5, 99, 31, 7, 200, 1, 64, 18]


class OneOf(SoloCommunicator):
    """A rank of a group that nobody else has joined: enough to load a model, not to run it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def load_tiny(folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> LoadedModel:
    return load(folder, SoloCommunicator(), CPU, dtype, **fields)


def last_logits(model: LoadedModel) -> torch.Tensor:
    """Of `PROMPT`'s last token."""
    facts = model.facts
    layout = KvLayout(facts.num_layers, facts.num_kv_heads, facts.head_dim, 4, facts.dtype, *facts.kv_heads)
    runner = ModelRunner(model, SoloCommunicator(), DevicePool(layout, 4, CPU))
    logits = runner.run(make_batch([Piece(PROMPT, 0, [2, 1])], 4))
    assert logits is not None
    return logits[0]


def expected_logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1].float()
    return logits


def make_other_model(folder: Path, model_type: str, **fields: Any) -> Path:
    """A tiny model of any architecture."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 260,
    }
    config = AutoConfig.for_model(model_type, **(shape | fields))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_facts_name_what_others_must_know(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3", num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=512)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    heard: list[float] = []

    facts = load(tmp_path, OneOf(1, 2), CPU, torch.bfloat16, heard.append).facts

    assert (facts.architecture, facts.num_layers, facts.head_dim, facts.dtype) == ("qwen3", 2, 16, "bfloat16")
    assert (facts.num_kv_heads, facts.kv_heads) == (3, (2, 3))
    assert (facts.vocab_size, facts.max_context_length) == (260, 512)
    assert facts.eos_token_ids == {AutoConfig.from_pretrained(tmp_path).eos_token_id, 7, 9}
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_bfloat16_is_as_near_as_transformers_own(tmp_path: Path, architecture: str) -> None:
    make_tiny_model(tmp_path, architecture)
    exact = expected_logits(tmp_path)

    ours = last_logits(load_tiny(tmp_path, torch.bfloat16))

    assert ours.dtype == torch.float32
    theirs_off = (expected_logits(tmp_path, torch.bfloat16) - exact).abs().max()
    assert (ours - exact).abs().max() < 2 * theirs_off


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    whole, parts = make_tiny_model(tmp_path / "whole"), tmp_path / "parts"
    shutil.copytree(whole, parts)
    weights = load_file(parts / "model.safetensors")
    (parts / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, mine in files.items():
        save_file({name: weights[name] for name in mine}, parts / file)
    index = {"weight_map": {name: file for file, mine in files.items() for name in mine}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))

    assert torch.equal(last_logits(load_tiny(parts)), last_logits(load_tiny(whole)))


def test_a_folder_of_the_base_model_alone_will_do_where_the_head_is_tied(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    expected = last_logits(load_tiny(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): weight for name, weight in weights.items()}, tmp_path / "model.safetensors")

    assert torch.equal(last_logits(load_tiny(tmp_path)), expected)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma3_text", {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 4}),
        ("granite", {"num_key_value_heads": 2, "logits_scaling": 3.0, "attention_multiplier": 0.2}),
        ("cohere", {"num_key_value_heads": 2, "logit_scale": 0.5}),
        ("starcoder2", {"num_key_value_heads": 2, "use_bias": True}),
        ("phi", {}),
        ("smollm3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_architectures_with_a_plan_work_too(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    make_other_model(tmp_path, model_type, **fields)

    torch.testing.assert_close(last_logits(load_tiny(tmp_path)), expected_logits(tmp_path), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("gpt2", {}, "gpt2 has no tensor-parallel plan"),
        (
            "mixtral",
            {"num_key_value_heads": 2, "num_local_experts": 2},
            "mixtral needs the tensor-parallel styles .*moe",
        ),
        ("gemma2", {"head_dim": 8, "num_key_value_heads": 2}, "Gemma2Attention asks for softcap in its attention"),
        ("phi3", {"pad_token_id": 0}, "phi3 needs the tensor-parallel styles colwise_gather_output"),
        ("bert", {}, "bert"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)
def test_an_architecture_that_cannot_be_served_is_named(
    tmp_path: Path, model_type: str, fields: dict[str, Any], message: str
) -> None:
    make_other_model(tmp_path, model_type, **fields)

    with pytest.raises(UnsupportedModel, match=message):
        load_tiny(tmp_path)


def test_more_ranks_than_kv_heads_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2)

    with pytest.raises(UnsupportedModel, match="tensor_parallel_size 3 must be between 1 and the model's 2 KV heads"):
        load(tmp_path, OneOf(0, 3), CPU, torch.float32)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))

    with pytest.raises(UnsupportedModel, match="nobody_knows"):
        load_tiny(tmp_path)


def test_a_folder_without_weights_or_configuration_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        load_tiny(tmp_path)
    make_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"no model\.safetensors"):
        load_tiny(tmp_path)


def test_a_missing_weight_and_one_of_another_shape_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    save_file(weights | {name: weights[name][:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModel, match=r"layers\.1\.mlp\.up_proj\.weight is \(103, 96\), without an edge of 104"
    ):
        load_tiny(tmp_path)

    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lack the weight model\.layers\.1\.mlp\.up_proj\.weight"):
        load_tiny(tmp_path)
