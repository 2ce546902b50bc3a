"""A Hugging Face model folder, as far as text is concerned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderError(Exception):
    """Raised when a model folder lacks what text needs, or holds what cannot be read; names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class TextFolder:
    """What a folder says. `chat_templates`: by name, `default` and perhaps `tool_use`; empty if it has none."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any]


def read_folder(folder: Path) -> TextFolder:
    """Read tokenizer, templates and generation settings. Raises FolderError."""
    if not folder.is_dir():
        raise FolderError(f"{folder} is not a folder; give the model's Hugging Face folder.")
    tokenizer = _read_tokenizer(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    _add_missing(tokenizer, special_tokens.values())
    generation = _read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id", _read_json(folder / "config.json").get("eos_token_id"))
    if eos is None and "eos_token" in special_tokens:
        eos = tokenizer.token_to_id(special_tokens["eos_token"])
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    return TextFolder(tokenizer, special_tokens, _chat_templates(folder, config), eos_token_ids, generation)


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FolderError(
            f"{folder} has no tokenizer.json. Load its tokenizer with transformers' AutoTokenizer and save it there: "
            "save_pretrained writes that file."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise FolderError(f"{file} is not a tokenizer that this version of `tokenizers` reads: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FolderError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise FolderError(f"{file} holds no JSON object.")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The names a template may use; a token is written as a string or as an object with `content`."""
    tokens = {}
    for name in SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _add_missing(tokenizer: Tokenizer, special_tokens: Iterable[str]) -> None:
    """Make these added tokens, as transformers does at loading, where tokenizer.json does not name them as such."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([token for token in dict.fromkeys(special_tokens) if token and token not in added])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own win over tokenizer_config.json, as with transformers."""
    templates = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    legacy = folder / "chat_template.json"
    templates |= _named_templates(_read_json(legacy).get("chat_template"), legacy)
    try:
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[file.stem] = file.read_text(encoding="utf-8")
        if (folder / "chat_template.jinja").is_file():
            templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FolderError(f"A chat template in {folder} cannot be read: {error}") from error
    return templates


def _named_templates(value: Any, file: Path) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case dict() if all(isinstance(template, str) for template in value.values()):
            return dict(value)
        case list() if all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value):
            return {str(item["name"]): str(item["template"]) for item in value}
    raise FolderError(f"The chat_template in {file} is neither a string nor a list of named templates.")
