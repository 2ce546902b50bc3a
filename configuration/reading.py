"""Reads settings; `settings.py` of each part is its only caller."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict


class SettingsError(Exception):
    """Raised when the configuration cannot be used; the message is for a person and names the key and its value."""


class Section(BaseModel):
    """A mapping of the configuration: frozen, and without keys that it does not name."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Settings = TypeVar("Settings", bound=Section)


def read_settings(model: type[Settings], file: Path | None, environment: Mapping[str, str], prefix: str) -> Settings:
    """The settings in `file` under those in `environment`.

    `PREFIX` + `A__B` overrides key `b` of section `a`; values are read as YAML. Raises SettingsError.
    """
    values = _read(file) if file is not None else {}
    _override(values, environment, prefix)
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        source = str(file) if file is not None else "the environment"
        raise SettingsError("\n".join(_explain(model, detail, source, prefix) for detail in error.errors())) from error


def read_secret(file: Path, key: str) -> bytes:
    """The secret in a file, without the line's end. Raises SettingsError, naming the key that names the file."""
    try:
        secret = file.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise SettingsError(f"{key} is {str(file)!r}: it cannot be read ({error.strerror}).") from error
    if not secret:
        raise SettingsError(f"{key} is {str(file)!r}: the file is empty.")
    return secret


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise SettingsError(f"The configuration {file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"The configuration {file} is not YAML: {' '.join(str(error).split())}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"The configuration {file} must be a mapping of keys to values.")
    return values


def _override(values: dict[str, Any], environment: Mapping[str, str], prefix: str) -> None:
    for name in sorted(environment):
        if not name.startswith(prefix):
            continue
        *sections, key = name[len(prefix) :].lower().split("__")
        level = values
        for section in sections:
            if not isinstance(level.get(section), dict):
                level[section] = {}
            level = level[section]
        try:
            level[key] = yaml.safe_load(environment[name])
        except yaml.YAMLError as error:
            raise SettingsError(
                f"The environment variable {name} is not YAML: {' '.join(str(error).split())}."
            ) from error


def _explain(model: type[Section], detail: Mapping[str, Any], source: str, prefix: str) -> str:
    location = [str(part) for part in detail["loc"]]
    path = ".".join(location)
    if detail["type"] == "extra_forbidden":
        known = _keys_beside(model, location)
        near = difflib.get_close_matches(location[-1], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known keys there are {', '.join(known)}."
        return f"{path} is an unknown key (read from {source} and {prefix}*): {hint}"
    if detail["type"] == "missing":
        return f"{path} is missing: set it in {source}, or as {prefix}{'__'.join(location).upper()}."
    reason = str(detail["msg"]).removeprefix("Value error, ")
    return f"{path} is {detail['input']!r} (read from {source} and {prefix}*): {reason[0].lower()}{reason[1:]}."


def _keys_beside(model: type[Section], location: list[str]) -> list[str]:
    section: Any = model
    for part in location[:-1]:
        found = section.model_fields[part].annotation
        section = next((choice for choice in getattr(found, "__args__", ()) if choice is not type(None)), found)
    return list(section.model_fields)
