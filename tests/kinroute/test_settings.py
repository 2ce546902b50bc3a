from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kinroute import settings
from kinroute.problem import Problem
from worker.settings import WorkerSettings, load_settings


def read(folder: Path, text: str) -> dict[str, object]:
    file = folder / "up.yaml"
    file.write_text(text)
    return settings.read(file)


def test_without_a_file_a_context_worker_of_two_ranks_and_a_generation_worker_of_one_are_started() -> None:
    shape = [(worker["role"], worker["tensor_parallel_size"]) for worker in settings.read(None)["workers"]]
    assert shape == [("context", 2), ("generation", 1)]


def embedded_worker(folder: Path, role: str) -> WorkerSettings:
    """As the worker itself reads what `up` writes for it."""
    (folder / "config.json").write_text("{}")
    given = next(worker for worker in settings.read(None)["workers"] if worker["role"] == role)
    file = folder / "worker.yaml"
    file.write_text(yaml.safe_dump({"model": str(folder)} | given))
    return load_settings(file, {})


def test_without_a_file_the_context_worker_demotes_finished_sub_agents(tmp_path: Path) -> None:
    cache = embedded_worker(tmp_path, "context").kv_cache_config

    assert cache.chosen_retention_policy == "subagent"
    assert cache.block_reuse_config.finished_subagent_priority == 1
    assert cache.block_reuse_config.finished_subagent_min_idle_iterations == 32
    assert cache.host_cache_size == 256 << 20


def test_without_a_file_the_generation_worker_knows_conversations_and_demotes_none(tmp_path: Path) -> None:
    cache = embedded_worker(tmp_path, "generation").kv_cache_config

    assert cache.block_reuse_config.policy == "per_conversation"
    assert cache.chosen_retention_policy == "lru"


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
