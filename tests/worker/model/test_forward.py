"""Our forward gives transformers' logits, whatever the architecture, the ranks and the way to cut the work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import make_tiny_model
from tests.worker.model.hand_made import Piece, make_batch
from tests.worker.model.ranks import NUM_PAGES, TOKENS_PER_BLOCK, RankGroup, rank_group

pytestmark = pytest.mark.slow

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral"]
# KV heads per rank: all; 1 + 1; 2 + 1; 1 + 1 + 1; 2 + 1 + 1.
SHAPES = {1: [(4, 2)], 2: [(4, 2), (6, 3)], 3: [(6, 3), (8, 4)]}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda size: f"tp{size}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with rank_group(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Prompts:
    """Sequences of random tokens, each in pages of its own, scattered; and transformers' logits at any position."""

    def __init__(self, folder: Path, lengths: dict[str, int]) -> None:
        rng = random.Random(5)
        pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
        self.tokens = {name: [rng.randrange(250) for _ in range(length)] for name, length in lengths.items()}
        needed = {name: -(-length // TOKENS_PER_BLOCK) for name, length in lengths.items()}
        self.pages = {name: [pages.pop() for _ in range(count)] for name, count in needed.items()}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            self._logits = {name: model(torch.tensor([ids])).logits[0] for name, ids in self.tokens.items()}

    def piece(self, name: str, start: int, stop: int, *, sampled: bool = True) -> Piece:
        return Piece(self.tokens[name][start:stop], start, self.pages[name], sampled)

    def assert_step(self, group: RankGroup, folder: Path, *cuts: tuple[str, int, int]) -> None:
        """One step over the tokens [start, stop) of each named sequence gives transformers' logits at `stop - 1`."""
        got = group.logits(folder, make_batch([self.piece(*cut) for cut in cuts], TOKENS_PER_BLOCK))
        expected = torch.stack([self._logits[name][stop - 1] for name, _, stop in cuts])
        torch.testing.assert_close(got, expected, atol=3e-4, rtol=1e-3)


def tiny(folders: Path, architecture: str, heads: tuple[int, int], **overrides: Any) -> Path:
    suffix = "-".join(map(str, (*heads, *overrides)))
    folder = folders / f"{architecture}-{suffix}"
    if not folder.exists():
        shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
        make_tiny_model(folder, architecture, **(shape | overrides))
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_mixture_of_chunks_and_decoding_gives_the_logits_of_transformers(
    group: RankGroup, folders: Path, architecture: str
) -> None:
    for heads in SHAPES[group.world_size]:
        folder = tiny(folders, architecture, heads)
        prompts = Prompts(folder, {"a": 80, "b": 120, "c": 9, "d": 33})

        # A whole prompt, longer than the window of Mistral, beside the first chunk of another.
        prompts.assert_step(group, folder, ("a", 0, 70), ("b", 0, 30))
        # Decoding beside a chunk that begins inside a page and goes past the window, beside a prompt of one token.
        prompts.assert_step(group, folder, ("a", 70, 71), ("b", 30, 101), ("c", 0, 1))
        # Decoding alone, contexts of very different lengths.
        prompts.assert_step(group, folder, ("c", 1, 2), ("b", 101, 102), ("a", 71, 72))
        # The same sequences in another order, among a whole prompt that fills its last page but for one token.
        prompts.assert_step(group, folder, ("b", 102, 103), ("d", 0, 31), ("c", 2, 3))
        # Across the edge of a page.
        prompts.assert_step(group, folder, ("d", 31, 32), ("a", 72, 73))
        prompts.assert_step(group, folder, ("d", 32, 33))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tied_embedding_serves_as_the_head_too(group: RankGroup, folders: Path, architecture: str) -> None:
    folder = tiny(folders, architecture, SHAPES[group.world_size][-1], tie_word_embeddings=True)
    prompts = Prompts(folder, {"a": 20})

    prompts.assert_step(group, folder, ("a", 0, 20))


def test_biases_are_added_once_however_many_ranks_sum(group: RankGroup, folders: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    folder = tiny(folders, "llama", SHAPES[group.world_size][-1], **biases)
    prompts = Prompts(folder, {"a": 20})

    prompts.assert_step(group, folder, ("a", 0, 20))


def test_rows_nobody_samples_cost_no_logits(group: RankGroup, folders: Path) -> None:
    folder = tiny(folders, "llama", SHAPES[group.world_size][0])
    prompts = Prompts(folder, {"a": 20, "b": 10})
    batch = make_batch([prompts.piece("a", 0, 12, sampled=False), prompts.piece("b", 0, 10)], TOKENS_PER_BLOCK)

    assert group.logits(folder, batch).shape == (1, 260)

    prompts.assert_step(group, folder, ("a", 12, 20))


def test_pages_are_copied_before_anything_is_written(group: RankGroup, folders: Path) -> None:
    folder = tiny(folders, "llama", SHAPES[group.world_size][0])
    prompts = Prompts(folder, {"a": 20})
    prompts.assert_step(group, folder, ("a", 0, 13))
    shared, partial = prompts.pages["a"][0], prompts.pages["a"][1]
    free = next(page for page in range(NUM_PAGES) if page not in prompts.pages["a"])

    other = Piece(prompts.tokens["a"][13:16], 13, [shared, free])
    logits = group.logits(folder, make_batch([other], TOKENS_PER_BLOCK, page_copies=((partial, free),)))

    expected = group.logits(folder, make_batch([prompts.piece("a", 13, 16)], TOKENS_PER_BLOCK))
    torch.testing.assert_close(logits, expected, atol=0, rtol=0)
