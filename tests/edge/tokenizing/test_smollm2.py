from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.tokenizing.incremental import pack
from edge.tokenizing.model import TextModel

TEXTS = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>\n", "<file_sep>", "the quick", " ", "\n", "42", "漢字", "🙂"])
    | st.text(max_size=8),
    max_size=20,
).map("".join)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[TextModel]:
    loaded = TextModel.load(smollm2, threads=1)
    yield loaded
    loaded.close()


@pytest.mark.slow
def test_the_embedded_models_prompts_are_exact_and_its_answers_readable(model: TextModel) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(TEXTS, min_size=1, max_size=4))
    def check(contents: list[str]) -> None:
        messages = [{"role": "user", "content": content + " over a lazy dog" * 40} for content in contents]
        expected = model.tokenizer.encode(model.render_chat(messages), add_special_tokens=False).ids
        assert model.tokenize_chat(messages, scope=b"a") == pack(expected)

        detokenizer = model.detokenizer()
        text = "".join(detokenizer.push([token_id]) for token_id in expected) + detokenizer.finish()
        assert text == model.tokenizer.decode(expected)

    check()
    assert model.counts.reused > 0
    assert not model.supports_tools
