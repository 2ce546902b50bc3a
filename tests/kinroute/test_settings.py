from __future__ import annotations

from pathlib import Path

import pytest

from kinroute import settings
from kinroute.problem import Problem


def read(folder: Path, text: str) -> dict[str, object]:
    file = folder / "up.yaml"
    file.write_text(text)
    return settings.read(file)


def test_without_a_file_a_context_worker_of_two_ranks_and_a_generation_worker_of_one_are_started() -> None:
    shape = [(worker["role"], worker["tensor_parallel_size"]) for worker in settings.read(None)["workers"]]
    assert shape == [("context", 2), ("generation", 1)]


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="unknown key worker; did you mean workers"):
        read(tmp_path, "worker: []")


def test_a_configuration_that_cannot_serve_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="a context and a generation worker, or an aggregated one"):
        read(tmp_path, "workers: [{role: context}]")


def test_what_is_not_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="is not YAML") as refused:
        read(tmp_path, "a: [1")
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="cannot be read: No such file"):
        settings.read(tmp_path / "none.yaml")
