"""Settings say what is wrong with them, where, and what would be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from configuration.reading import SettingsError
from tests.settings_schemas import GOLDEN, schema_of
from worker.kv_settings import KvCacheConfig
from worker.settings import WorkerSettings, load_settings


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

    assert (settings.role, settings.listen.grpc, settings.listen.admin.address) == (
        "generation",
        "127.0.0.1:9",
        "127.0.0.1:2",
    )


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
        ({"listen": {"grpc": "0.0.0.0:1", "tls": {"certificate_file": "/c", "key_file": "/k"}}}, {}, "set keys_file"),
        ({"listen": {"admin": "0.0.0.0:1"}}, {}, "listen.admin is '0.0.0.0:1'.*listen.admin.allow_plaintext"),
        ({"kv_transfer": {"listen_host": "10.0.0.1"}}, {}, "kv_transfer.listen_host is '10.0.0.1'.*the pages of"),
        (
            {"listen": {"tls": {"certificate_file": "/c", "key_file": "/k"}}},
            {},
            "kv_transfer.tls is missing.*set kv_transfer.tls.ca_file",
        ),
        ({"kv_cache_config": {"max_tokens": 8}}, {}, "kv_cache_config.max_tokens is 8: less than one block"),
    ],
)
def test_a_wrong_value_names_its_path_itself_and_what_is_allowed(
    tmp_path: Path, model: Path, values: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    file = write(tmp_path, model=str(model), **values)

    with pytest.raises(SettingsError, match=message):
        load_settings(file, environment)


CERTIFICATE = {"certificate_file": "/c", "key_file": "/k"}
MUTUAL = {**CERTIFICATE, "client_ca_file": "/ca"}


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({"listen": {"grpc": "0.0.0.0:1", "tls": MUTUAL}}, ""),
        ({"listen": {"tls": CERTIFICATE}, "role": "context"}, ""),
        ({"listen": {"tls": CERTIFICATE}, "kv_transfer": {"tls": {"ca_file": "/ca"}}}, ""),
        ({"listen": {"tls": MUTUAL}, "kv_transfer": {"listen_host": "10.0.0.1"}}, ""),
        ({"listen": {"grpc": "0.0.0.0:1", "allow_plaintext": True}, "keys_file": "/k"}, "prompts and answers travel"),
        ({"listen": {"allow_plaintext": True}, "kv_transfer": {"listen_host": "10.0.0.1"}}, "the pages of prompts"),
        ({"listen": {"admin": {"address": "0.0.0.0:1", "allow_plaintext": True}}}, "metrics, keys and control calls"),
        ({"listen": {"admin": {"address": "0.0.0.0:1", "tls": CERTIFICATE}}}, ""),
        ({"listen": {"grpc": "0.0.0.0:1", "tls": CERTIFICATE, "allow_anonymous": True}, "role": "context"}, "no edge"),
    ],
)
def test_what_is_protected_or_said_to_be_may_start_and_what_is_open_is_warned_of(
    tmp_path: Path, model: Path, values: dict[str, Any], warned: str
) -> None:
    warnings = " ".join(load_settings(write(tmp_path, model=str(model), **values), {}).warnings)

    assert warned in warnings
    assert bool(warned) == bool(warnings)


def test_pages_are_pulled_with_the_listeners_certificates_unless_others_are_named(tmp_path: Path, model: Path) -> None:
    def pull_tls(**values: Any) -> dict[str, str] | None:
        tls = load_settings(write(tmp_path, model=str(model), **values), {}).pull_tls
        return None if tls is None else tls.model_dump(mode="json", exclude_none=True)

    own = {"tls": MUTUAL}
    assert pull_tls() is None
    assert pull_tls(listen=own) == {**CERTIFICATE, "ca_file": "/ca"}
    assert pull_tls(listen=own, kv_transfer={"tls": {"ca_file": "/o", "server_name": "n"}}) == {
        **CERTIFICATE,
        "ca_file": "/o",
        "server_name": "n",
    }
    other = {"ca_file": "/o", "certificate_file": "/oc", "key_file": "/ok"}
    assert pull_tls(listen=own, kv_transfer={"tls": other}) == other
    assert pull_tls(kv_transfer={"tls": {"ca_file": "/o"}}) == {"ca_file": "/o"}


def test_a_certificate_that_cannot_be_used_keeps_a_worker_from_starting(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, model=str(model), listen={"tls": MUTUAL})

    started = subprocess.run(
        [sys.executable, "-m", "kinroute", "worker", "--config", str(file)], capture_output=True, text=True, timeout=60
    )

    assert (started.returncode, started.stdout) == (78, "")
    assert "listen.tls.certificate_file is '/c': it cannot be read (No such file or directory)." in started.stderr
    assert "Traceback" not in started.stderr


RUNNING = Path(__file__).parents[2] / "docs" / "running.md"
KV = "kv_cache_config"
REUSE = "kv_cache_config.block_reuse_config"
PER_CONVERSATION = {"policy": "per_conversation"}


def kv(**values: Any) -> dict[str, Any]:
    return {"kv_cache_config": values}


def reuse(**values: Any) -> dict[str, Any]:
    return kv(block_reuse_config=values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (kv(host_cash_size=0), f"{KV}.host_cash_size is an unknown key .* did you mean host_cache_size\\?"),
        (reuse(polisy="x"), f"{REUSE}.polisy is an unknown key .* did you mean policy\\?"),
        (kv(enable_block_reuse=3), f"{KV}.enable_block_reuse is 3 .*valid boolean"),
        (kv(tokens_per_block=0), f"{KV}.tokens_per_block is 0 .*greater than or equal to 1"),
        (kv(tokens_per_block=True), f"{KV}.tokens_per_block is True .*valid integer"),
        (kv(tokens_per_block=1025), f"{KV}.tokens_per_block is 1025 .*less than or equal to 1024"),
        (kv(max_tokens=0), f"{KV}.max_tokens is 0 .*greater than or equal to 1"),
        (kv(free_gpu_memory_fraction=1.0), f"{KV}.free_gpu_memory_fraction is 1.0 .*less than 1"),
        (kv(free_gpu_memory_fraction=float("nan")), f"{KV}.free_gpu_memory_fraction is nan"),
        (kv(host_cache_size=-1), f"{KV}.host_cache_size is -1 .*greater than or equal to 0"),
        (kv(host_cache_size=1.5), f"{KV}.host_cache_size is 1.5 .*valid integer"),
        (kv(host_cache_size="4 gigs"), f"{KV}.host_cache_size is '4 gigs' .*such as 4GiB .B, KiB"),
        (kv(host_cache_size="-4GiB"), f"{KV}.host_cache_size is '-4GiB' .*such as 4GiB"),
        (kv(host_cache_size="9999999TiB"), f"{KV}.host_cache_size is '9999999TiB' .*at most 1048576TiB"),
        (kv(disk_cache_size=1 << 20), f"{KV}.disk_cache_size is 1048576, but {KV}.disk_cache_path is not set"),
        (kv(disk_cache_size="1MiB", disk_cache_path="/nowhere"), f"{KV}.disk_cache_path is '/nowhere': .*folder"),
        (kv(recording_dir="/nowhere"), f"{KV}.recording_dir is '/nowhere': .*folder"),
        (kv(recording_max_bytes="lots"), f"{KV}.recording_max_bytes is 'lots' .*such as 4GiB"),
        (kv(cold_tier_offload_min_priority=-1), f"{KV}.cold_tier_offload_min_priority is -1 .*equal to 0"),
        (kv(cold_tier_offload_min_priority=101), f"{KV}.cold_tier_offload_min_priority is 101 .*equal to 100"),
        (kv(max_util_for_resume=0), f"{KV}.max_util_for_resume is 0 .*greater than 0"),
        (kv(max_util_for_resume=1.01), f"{KV}.max_util_for_resume is 1.01 .*less than or equal to 1"),
        (kv(max_offload_pages_per_plan=0), f"{KV}.max_offload_pages_per_plan is 0 .*equal to 1"),
        (kv(max_onboard_pages_per_plan="many"), f"{KV}.max_onboard_pages_per_plan is 'many' .*valid integer"),
        (kv(copy_timeout_s=0), f"{KV}.copy_timeout_s is 0 .*greater than 0"),
        (kv(event_buffer_max_size=-1), f"{KV}.event_buffer_max_size is -1 .*equal to 0"),
        (kv(max_tracked_conversations=0), f"{KV}.max_tracked_conversations is 0 .*equal to 1"),
        (kv(idle_step_ms=0), f"{KV}.idle_step_ms is 0 .*equal to 1"),
        (kv(retention_policy="fifo"), f"{KV}.retention_policy is 'fifo' .*'lru', 'subagent' or 'return_index'"),
        (kv(retention_policy="return_index"), f"{KV}.retention_policy is 'return_index', .*needs policy: per_conversa"),
        (
            kv(retention_policy="return_index", enable_block_reuse=False, block_reuse_config=PER_CONVERSATION),
            f"{KV}.retention_policy is 'return_index', but {KV}.enable_block_reuse is false",
        ),
        (
            {"role": "generation", **kv(retention_policy="return_index", block_reuse_config=PER_CONVERSATION)},
            f"{KV}.retention_policy is 'return_index', but role is 'generation'",
        ),
        (kv(retention_policy="subagent"), f"{KV}.retention_policy is 'subagent', but {REUSE}.*not set: nothing would"),
        (reuse(policy="per_family"), f"{REUSE}.policy is 'per_family' .*'per_request' or 'per_conversation'"),
        (
            reuse(max_num_turns=2),
            f"{REUSE}.max_num_turns is 2 .*default, null: .*sliding-window layers keep their pages",
        ),
        (reuse(**PER_CONVERSATION, finished_subagent_priority=-1), "finished_subagent_priority is -1 .*equal to 0"),
        (reuse(**PER_CONVERSATION, finished_subagent_priority=36), "finished_subagent_priority is 36 .*equal to 35"),
        (reuse(finished_subagent_min_idle_iterations=-1), f"{REUSE}.finished_subagent_min_idle_iterations is -1"),
        (
            kv(retention_policy="lru", block_reuse_config={**PER_CONVERSATION, "finished_subagent_priority": 1}),
            f"{REUSE}.finished_subagent_priority is 1, but {KV}.retention_policy is 'lru', which demotes nothing",
        ),
        (
            kv(enable_block_reuse=False, block_reuse_config={**PER_CONVERSATION, "finished_subagent_priority": 1}),
            f"{REUSE}.finished_subagent_priority is 1, but {KV}.enable_block_reuse is false",
        ),
        (
            {"role": "generation", **reuse(**PER_CONVERSATION, finished_subagent_priority=1)},
            f"{REUSE}.finished_subagent_priority is 1, but role is 'generation'",
        ),
    ],
)
def test_a_wrong_value_of_the_cache_is_refused(
    tmp_path: Path, model: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(write(tmp_path, model=str(model), **values), {})


@pytest.mark.parametrize("policy", ["all_reusable", "per_request", None])
def test_finished_subagent_priority_requires_per_conversation(tmp_path: Path, model: Path, policy: str | None) -> None:
    given = {"finished_subagent_priority": 1} | ({"policy": policy} if policy else {})
    refused = write(tmp_path, model=str(model), **reuse(**given))

    with pytest.raises(SettingsError, match=f"{REUSE}.finished_subagent_priority is 1, .*policy: per_conversation"):
        load_settings(refused, {})

    served = load_settings(write(tmp_path, model=str(model), **reuse(**(given | PER_CONVERSATION))), {})
    assert served.kv_cache_config.block_reuse_config.finished_subagent_priority == 1


@pytest.mark.parametrize("priority", [0, 35])
def test_the_bounds_of_the_finished_subagent_priority_are_allowed(tmp_path: Path, model: Path, priority: int) -> None:
    file = write(tmp_path, model=str(model), **reuse(**PER_CONVERSATION, finished_subagent_priority=priority))

    assert load_settings(file, {}).kv_cache_config.chosen_retention_policy == "subagent"


def test_without_a_finished_subagent_priority_nothing_but_recency_decides(tmp_path: Path, model: Path) -> None:
    settings = load_settings(write(tmp_path, model=str(model), **reuse(**PER_CONVERSATION)), {})

    assert settings.kv_cache_config.chosen_retention_policy == "lru"


@pytest.mark.parametrize("priority", [None, 1])
def test_the_return_index_goes_with_demotion_and_without(tmp_path: Path, model: Path, priority: int | None) -> None:
    given = {**PER_CONVERSATION, "finished_subagent_priority": priority}
    file = write(tmp_path, model=str(model), **kv(retention_policy="return_index", block_reuse_config=given))

    assert load_settings(file, {}).kv_cache_config.chosen_retention_policy == "return_index"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("2kb", 2000),
        ("10 GB", 10**10),
        ("1TiB", 1 << 40),
        ("7B", 7),
        ("0", 0),
        (5, 5),
    ],
)
def test_sizes_are_numbers_or_text(tmp_path: Path, model: Path, text: object, size: int) -> None:
    settings = load_settings(write(tmp_path, model=str(model), **kv(host_cache_size=text)), {})

    assert settings.kv_cache_config.host_cache_size == size


def test_a_size_from_the_environment_may_be_text(tmp_path: Path, model: Path) -> None:
    settings = load_settings(
        write(tmp_path, model=str(model)), {"KINROUTE_WORKER_KV_CACHE_CONFIG__HOST_CACHE_SIZE": "64MiB"}
    )

    assert settings.kv_cache_config.host_cache_size == 64 << 20


def test_ranks_get_the_settings_that_the_launcher_read(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, model=str(model), **kv(disk_cache_size="1MiB", disk_cache_path=str(tmp_path)))
    settings = load_settings(file, {})

    assert WorkerSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_STATE_HOME": "/state", "HOME": "/home/me"}, "/state/kinroute/recordings"),
        ({"XDG_STATE_HOME": "not absolute", "HOME": "/home/me"}, "/home/me/.local/state/kinroute/recordings"),
        ({"HOME": "/home/me"}, "/home/me/.local/state/kinroute/recordings"),
    ],
)
def test_recordings_lie_in_the_users_state_folder(
    tmp_path: Path, model: Path, environment: dict[str, str], folder: str
) -> None:
    assert load_settings(write(tmp_path, model=str(model)), environment).kv_cache_config.recording_dir == Path(folder)


def test_nothing_is_recorded_without_a_home_unless_a_folder_is_named(tmp_path: Path, model: Path) -> None:
    named = kv(recording_dir=str(tmp_path))

    assert load_settings(write(tmp_path, model=str(model)), {}).kv_cache_config.recording_dir is None
    assert load_settings(write(tmp_path, model=str(model), **named), {}).kv_cache_config.recording_dir == tmp_path


def test_the_settings_are_those_of_the_golden_file() -> None:
    assert schema_of(WorkerSettings) == GOLDEN[WorkerSettings].read_text(), "run `make schemas`, and review the change"


def test_the_documentation_lists_every_key_of_the_cache_with_its_default() -> None:
    rows = [line.split("|") for line in RUNNING.read_text().splitlines()]
    documented = {row[1].strip(" `"): row[2].strip(" `") for row in rows if len(row) > 3}

    def shown(value: object) -> str:
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    config = KvCacheConfig()
    keys = {key: shown(value) for key, value in config if key != "block_reuse_config"}
    keys |= {f"block_reuse_config.{key}": shown(value) for key, value in config.block_reuse_config}
    assert {key: documented.get(key) for key in keys} == keys


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
