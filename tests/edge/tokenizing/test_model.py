from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from edge.core.errors import Code, EdgeError
from edge.tokenizing.folder import FolderError
from edge.tokenizing.model import TextModel
from edge.tokenizing.tool_calls import ToolFormat
from tests.edge.tokenizing.samples import CHATML, HERMES, MAKERS, sample, write_folder

TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "naïve <read>", "parameters": {"type": "object"}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "the quick"},
    {"role": "user", "content": "brown fox"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "é"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "jumps over"},
    {"role": "assistant", "content": "a lazy dog"},
    {"role": "user", "content": "漢字?"},
]


def unpack(ids: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(ids) // 4}I", ids))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[TextModel]:
    loaded = TextModel.load(write_folder(tmp_path, sample("byte_level_bpe"), HERMES), threads=1)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_chat_tokenizes_as_with_transformers(tmp_path: Path, kind: str) -> None:
    folder = write_folder(tmp_path, sample(kind), HERMES)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    model = TextModel.load(folder, threads=1)
    parsed = [dict(message) for message in MESSAGES]
    parsed[2]["tool_calls"] = [{"function": {"name": "read", "arguments": {"path": "é"}}}]

    for length in range(1, len(MESSAGES) + 1):
        expected = reference.apply_chat_template(
            parsed[:length], tools=[TOOL], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert unpack(model.tokenize_chat(MESSAGES[:length], [TOOL], scope=b"")) == expected
    model.close()


@pytest.mark.parametrize("kind", ["byte_level_bpe", "llama3_like", "wordpiece"])
def test_a_plain_prompt_gets_the_tokens_that_the_tokenizer_puts_around_it(tmp_path: Path, kind: str) -> None:
    model = TextModel.load(write_folder(tmp_path, sample(kind)), threads=1)

    for text in ("", "a", "the quick <s>brown fox"):
        assert unpack(model.tokenize_text(text)) == sample(kind).encode(text).ids
        bare = sample(kind).encode(text, add_special_tokens=False).ids
        assert unpack(model.tokenize_text(text, add_special_tokens=False)) == bare
    model.close()


@pytest.mark.anyio
async def test_the_asynchronous_calls_give_the_same_ids(model: TextModel) -> None:
    assert await model.tokenize_chat_async(MESSAGES, [TOOL], scope=b"a") == model.tokenize_chat(
        MESSAGES, [TOOL], scope=b"b"
    )
    assert await model.tokenize_text_async("fox" * 9_000) == model.tokenize_text("fox" * 9_000, scope=b"b")


def test_tools_change_the_prompt_only_if_the_template_reads_them(tmp_path: Path, model: TextModel) -> None:
    without = TextModel.load(write_folder(tmp_path / "plain", sample("byte_level_bpe"), CHATML), threads=1)

    assert (model.supports_tools, model.tool_format) == (True, ToolFormat.HERMES)
    assert (without.supports_tools, without.tool_format) == (False, None)
    assert without.tool_call_parser(["read"]) is None
    without.close()


def test_marks_of_calls_are_text_only_for_requests_with_tools(tmp_path: Path) -> None:
    tokenizer = sample("no_specials").from_str(sample("no_specials").to_str())
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    model = TextModel.load(write_folder(tmp_path, tokenizer, HERMES), threads=1)
    ids = unpack(model.tokenize_text("<tool_call>fox</tool_call>"))

    assert model.detokenizer().push(ids) == "fox"
    assert model.detokenizer(tools=True).push(ids) == "<tool_call>fox</tool_call>"
    model.close()


def test_half_of_a_surrogate_pair_is_the_callers_fault(model: TextModel) -> None:
    with pytest.raises(EdgeError) as caught:
        model.tokenize_chat([{"role": "user", "content": "a\ud83d"}], scope=b"")

    assert (caught.value.code, caught.value.param) == (Code.INVALID, "messages")


def test_a_model_without_a_template_serves_no_chat(tmp_path: Path) -> None:
    model = TextModel.load(write_folder(tmp_path, sample("byte_level_bpe"), None), threads=1)

    assert not model.has_chat_template
    with pytest.raises(EdgeError, match="no chat template"):
        model.tokenize_chat(MESSAGES, scope=b"")
    model.close()


def test_a_template_that_does_not_compile_is_the_folders_fault(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="does not compile"):
        TextModel.load(write_folder(tmp_path, sample("byte_level_bpe"), "{% if %}"))
