from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.tokenizing.folder import FolderError, read_folder
from tests.edge.tokenizing.samples import CHATML, HERMES, sample, write_folder


def configure(folder: Path, file: str = "tokenizer_config.json", **settings: object) -> Path:
    (folder / file).write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, sample("byte_level_bpe"), template=None)


def test_special_tokens_are_read_as_strings_and_as_objects(folder: Path) -> None:
    configure(folder, "special_tokens_map.json", unk_token={"content": "<unk>"}, bos_token="old")
    configure(folder, bos_token="<s>", eos_token={"content": "<|im_end|>"}, pad_token=None)

    assert read_folder(folder).special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}


@pytest.mark.parametrize("template", [HERMES, {"default": HERMES}, [{"name": "default", "template": HERMES}]])
def test_the_template_in_the_configuration_may_be_one_or_named(folder: Path, template: object) -> None:
    configure(folder, chat_template=template)

    assert read_folder(folder).chat_templates == {"default": HERMES}


def test_a_template_file_wins_over_the_configuration(folder: Path) -> None:
    configure(folder, chat_template="old")
    configure(folder, "chat_template.json", chat_template="newer")
    assert read_folder(folder).chat_templates == {"default": "newer"}

    (folder / "chat_template.jinja").write_text(CHATML)
    assert read_folder(folder).chat_templates == {"default": CHATML}


def test_a_folder_without_a_template_is_a_model_without_chat(folder: Path) -> None:
    assert read_folder(folder).chat_templates == {}


@pytest.mark.parametrize(("stop", "expected"), [(2, (2,)), ([2, 4], (2, 4))])
def test_the_tokens_that_end_an_answer_come_from_the_generation_settings(
    folder: Path, stop: object, expected: tuple[int, ...]
) -> None:
    configure(folder, "generation_config.json", eos_token_id=stop)

    assert read_folder(folder).eos_token_ids == expected


def test_else_the_token_that_ends_an_answer_is_the_tokenizers(folder: Path) -> None:
    assert read_folder(folder).eos_token_ids == (sample("byte_level_bpe").token_to_id("<|im_end|>"),)


def test_truncation_that_a_tokenizer_was_saved_with_is_off(tmp_path: Path) -> None:
    write_folder(tmp_path, sample("byte_level_bpe"))
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))

    assert len(read_folder(tmp_path).tokenizer.encode("the quick brown fox").ids) > 2


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "save_pretrained"),
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "no JSON object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
    ],
)
def test_what_a_folder_lacks_is_said_with_the_files_name(
    folder: Path, file: str, content: str | None, message: str
) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)

    with pytest.raises(FolderError, match=message) as caught:
        read_folder(folder)

    assert str(folder) in str(caught.value)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="not a folder"):
        read_folder(tmp_path / "absent")
