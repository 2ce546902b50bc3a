"""Settings say what is wrong with them, where, and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configuration.reading import SettingsError
from worker.settings import load_settings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def write(folder: Path, **values: Any) -> Path:
    file = folder / "worker.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_the_environment_overrides_the_file_at_every_level(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, model=str(model), role="context", listen={"grpc": "127.0.0.1:1", "admin": "127.0.0.1:2"})

    settings = load_settings(
        file, {"KINROUTE_WORKER_ROLE": "generation", "KINROUTE_WORKER_LISTEN__GRPC": "127.0.0.1:9"}
    )

    assert (settings.role, settings.listen.grpc, settings.listen.admin) == ("generation", "127.0.0.1:9", "127.0.0.1:2")


@pytest.mark.parametrize(
    ("values", "environment", "message"),
    [
        ({"rolle": "context"}, {}, "rolle is an unknown key .* did you mean role\\?"),
        ({"listen": {"grcp": "x"}}, {}, "listen.grcp is an unknown key .* did you mean grpc\\?"),
        (
            {},
            {"KINROUTE_WORKER_KV_TRANSFER__TIMEOUT": "3"},
            "kv_transfer.timeout is an unknown .* did you mean timeout_s\\?",
        ),
        ({"role": "prefill"}, {}, "role is 'prefill' .*'context', 'generation' or 'aggregated'"),
        ({"tensor_parallel_size": 0}, {}, "tensor_parallel_size is 0 .* greater than or equal to 1"),
        ({"listen": {"grpc": "nowhere"}}, {}, "listen.grpc is 'nowhere' .* must be host:port"),
        ({"kv_transfer": {"allowed_networks": ["ten"]}}, {}, "kv_transfer.allowed_networks.0 is 'ten'"),
        ({"listen": {"grpc": "0.0.0.0:1"}}, {}, "listen.grpc is '0.0.0.0:1'.*allow_plaintext"),
        ({"listen": {"grpc": "0.0.0.0:1", "allow_plaintext": True}}, {}, "set keys_file"),
        ({"listen": {"admin": "0.0.0.0:1"}}, {}, "listen.admin is '0.0.0.0:1'.*loopback"),
        ({"kv_cache_config": {"max_tokens": 8}}, {}, "kv_cache_config.max_tokens is 8: less than one block"),
    ],
)
def test_a_wrong_value_names_its_path_itself_and_what_is_allowed(
    tmp_path: Path, model: Path, values: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    file = write(tmp_path, model=str(model), **values)

    with pytest.raises(SettingsError, match=message):
        load_settings(file, environment)


def test_a_missing_model_is_told_with_the_two_ways_to_set_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model is missing: set it in .*worker.yaml, or as KINROUTE_WORKER_MODEL"):
        load_settings(write(tmp_path), {})


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no config\.json there"):
        load_settings(write(tmp_path, model=str(tmp_path)), {})


def test_a_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("a: [")

    with pytest.raises(SettingsError, match=r"worker\.yaml is not YAML"):
        load_settings(file, {})
