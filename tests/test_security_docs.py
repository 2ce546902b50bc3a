"""docs/security.md names tests, commands and settings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from edge.settings import EdgeSettings
from kinroute.__main__ import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "security.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
COMMANDS = sorted(set(re.findall(r"kinroute (keys? \w[\w-]*|bench \w+)", TEXT)))
SETTINGS = sorted(set(re.findall(r"`((?:limits|auth|affinity)\.[\w.]+)(?:: [^`]*)?`", TEXT)))


def test_every_test_of_the_threat_table_exists() -> None:
    assert len(TESTS) > 40
    missing = [f"{file}::{name}" for file, name in TESTS if name not in functions_of(ROOT / file)]

    assert not missing


def functions_of(file: Path) -> set[str]:
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_runbook_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])

    assert ended.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_exists(path: str) -> None:
    schema = EdgeSettings.model_json_schema()
    section: Any = schema
    for name in path.split("."):
        assert name in section["properties"], f"{path}: no {name}"
        section = section["properties"][name]
        for option in section.get("anyOf", [section]):
            if "$ref" in option:
                section = schema["$defs"][option["$ref"].rpartition("/")[2]]
