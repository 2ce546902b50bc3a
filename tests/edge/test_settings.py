"""An edge's configuration: what is wrong is named, with its value and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from configuration.reading import SettingsError, read_secret
from edge.settings import EdgeSettings, load_settings
from tests.settings_schemas import GOLDEN, schema_of

GOOD: dict[str, Any] = {
    "model": {"name": "m", "path": "/models/m"},
    "keys_file": "/keys.json",
    "generation_servers": ["127.0.0.1:7100"],
}


def write(folder: Path, values: object) -> Path:
    file = folder / "edge.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def problem(folder: Path, values: dict[str, Any], environment: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as refused:
        load_settings(write(folder, values), environment or {})
    return str(refused.value)


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, GOOD), {})

    assert settings.listen.http == "127.0.0.1:8000"
    assert settings.router.type == "conversation"
    assert settings.router.spill_depth == 4
    assert settings.context_servers == ()


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    environment = {
        "KINROUTE_EDGE_LISTEN__HTTP": "127.0.0.1:9000",
        "KINROUTE_EDGE_CONTEXT_SERVERS": "[127.0.0.1:1, 127.0.0.1:2]",
        "KINROUTE_WORKER_MODEL": "not ours",
    }

    settings = load_settings(write(tmp_path, GOOD | {"listen": {"admin": "127.0.0.1:9001"}}), environment)

    assert settings.listen.http == "127.0.0.1:9000"
    assert settings.listen.admin.address == "127.0.0.1:9001"
    assert settings.context_servers == ("127.0.0.1:1", "127.0.0.1:2")


def test_the_environment_alone_is_enough() -> None:
    environment = {
        "KINROUTE_EDGE_MODEL__NAME": "m",
        "KINROUTE_EDGE_MODEL__PATH": "/models/m",
        "KINROUTE_EDGE_GENERATION_SERVERS": "[127.0.0.1:1]",
        "KINROUTE_EDGE_LISTEN__ALLOW_ANONYMOUS": "true",
    }

    assert load_settings(None, environment).model.name == "m"


URL = {
    "jwks_url": "https://issuer.test/keys",
    "algorithms": ["RS256"],
    "issuer": "https://issuer.test",
    "audience": "us",
}


@pytest.mark.parametrize(
    ("jwt", "expected"),
    [
        ({}, "auth.jwt needs exactly one of jwks_url, jwks_file, public_key_file, secret_file; it has none."),
        ({"secret_file": "/s", "jwks_file": "/j"}, "it has jwks_file and secret_file"),
        (
            {"secret_file": "/s", "algorithms": ["RS256"]},
            "holds 'RS256', which no key of auth.jwt.secret_file can be for",
        ),
        ({"secret_file": "/s", "algorithms": ["none"]}, "auth.jwt.algorithms.0 is 'none'"),
        (
            {"public_key_file": "/p", "algorithms": ["RS256", "HS256"]},
            "'HS256', which no key of auth.jwt.public_key_file",
        ),
        ({"jwks_file": "/p"}, "auth.jwt.algorithms is missing"),
        (URL | {"algorithms": ["HS256"]}, "'HS256', which no key of auth.jwt.jwks_url can be for"),
        ({name: value for name, value in URL.items() if name != "audience"}, "auth.jwt.audience is missing"),
        ({name: value for name, value in URL.items() if name != "issuer"}, "auth.jwt.issuer is missing"),
        (URL | {"jwks_url": "http://issuer.test/keys"}, "put keys of their own there; use https"),
        (URL | {"jwks_url": "http://[::1/keys"}, "which is no URL"),
        (URL | {"jwks_url": "file:///etc/passwd"}, "it must be https://HOST/PATH"),
        (URL | {"jwks_url": "https://user:hush@issuer.test/keys"}, "settings are no place for secrets"),
        (URL | {"refresh_s": 1}, "auth.jwt.refresh_s is 1"),
        (URL | {"scope_map": {"x": "admin"}}, "'affinity' or 'operator'"),
        ({"secret_file": "/s", "ca_file": "/c"}, "there is no server to check"),
    ],
)
def test_a_wrong_source_of_tokens_names_itself(tmp_path: Path, jwt: dict[str, Any], expected: str) -> None:
    assert expected in problem(tmp_path, GOOD | {"auth": {"jwt": jwt}})


@pytest.mark.parametrize(
    "jwt",
    [
        URL,
        URL | {"issuer": None, "audience": None},
        URL | {"jwks_url": "http://127.0.0.1:1/keys"},
        URL
        | {"jwks_url": "http://localhost/keys", "claims": {"scopes": ["scp", "roles"]}, "scope_map": {"x": "operator"}},
        {"jwks_file": "/j", "algorithms": ["HS256", "EdDSA"]},
        {"public_key_file": "/p", "algorithms": ["PS512"]},
        {"secret_file": "/s"},
    ],
)
def test_sources_of_tokens_that_make_sense_are_taken(tmp_path: Path, jwt: dict[str, Any]) -> None:
    assert load_settings(write(tmp_path, GOOD | {"auth": {"jwt": jwt}}), {}).auth.jwt is not None


def test_every_example_of_the_documentation_is_taken(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "authentication.md").read_text()
    examples = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    assert len(examples) == 5
    for example in examples:
        assert load_settings(write(tmp_path, GOOD | yaml.safe_load(example)), {}).auth.jwt is not None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"modle": {}}, "modle is an unknown key"),
        ({"modle": {}}, "did you mean model?"),
        ({"listen": {"htpp": "x"}}, "listen.htpp is an unknown key"),
        ({"auth": {"jwt": {"secret": "x"}}}, "auth.jwt.secret is an unknown key"),
        ({"auth": {"jwt": {"secret": "x"}}}, "did you mean secret_file?"),
        ({"zzz": 1}, "known keys there are listen, model,"),
        ({"router": {"type": "random"}}, "router.type is 'random'"),
        ({"router": {"type": "random"}}, "'conversation', 'kv_cache_aware', 'load_balancing' or 'round_robin'"),
        ({"router": {"spill_depth": 0}}, "router.spill_depth is 0"),
        ({"affinity": {"namespace": "tenant", "proof": "token"}}, "choose one of them"),
        (
            {"affinity": {"proof": "token"}, "keys_file": None, "listen": {"allow_anonymous": True}},
            "keys_file is missing",
        ),
        ({"affinity": {"proof": "trust"}}, "affinity.proof is 'trust'"),
        ({"affinity": {"token_life_s": 86_401}}, "affinity.token_life_s is 86401"),
        ({"affinity": {"token_life_s": 59}}, "affinity.token_life_s is 59"),
        ({"affinity": {"headers": {"convrsation": "x"}}}, "did you mean conversation?"),
        ({"affinity": {"headers": {"parent": "x parent"}}}, "affinity.headers.parent is 'x parent'"),
        ({"affinity": {"headers": {"parent": "x-parent:"}}}, "a header's name of letters, digits and dashes"),
        ({"affinity": {"headers": {"parent": "Authorization"}}}, "a credential, the protocol's own, or dropped"),
        ({"affinity": {"headers": {"others": ["kinroute_lineage"]}}}, "a credential, the protocol's own, or dropped"),
        ({"affinity": {"headers": {"lineage": "x-lineage-bin"}}}, "a credential, the protocol's own, or dropped"),
        ({"affinity": {"headers": {"parent": "x-trtllm-parent"}}}, "a credential, the protocol's own, or dropped"),
        ({"affinity": {"headers": {"parent": "X_Kinroute_Lineage"}}}, "affinity.headers.lineage are both"),
        (
            {"conversation_affinity_header_for_subagents": "cookie"},
            "conversation_affinity_header_for_subagents is 'cookie'",
        ),
        ({"limits": {"lineage_depth": 0}}, "limits.lineage_depth is 0"),
        ({"limits": {"parent_children": 0}}, "limits.parent_children is 0"),
        ({"router": {"clear_gain_tokens": 0}}, "router.clear_gain_tokens is 0"),
        ({"router": {"kv_index_max_bytes": "4 gigs"}}, "text such as 4GiB"),
        ({"router": {"kv_index_max_bytes": 1000}}, "router.kv_index_max_bytes is 1000: it must be at least 36864"),
        ({"limits": {"body_bytes": "big"}}, "limits.body_bytes is 'big'"),
        ({"listen": {"http": "8000"}}, "listen.http is '8000'"),
        ({"listen": {"http": "8000"}}, "must be host:port"),
        ({"generation_servers": []}, "generation_servers is []"),
        ({"generation_servers": ["w:0"]}, "port 0"),
        ({"keys_file": None}, "keys_file is missing"),
        ({"model": {"name": "m"}}, "model.path is missing"),
        ({"model": {"name": "m"}}, "KINROUTE_EDGE_MODEL__PATH"),
        ({"model": {"name": "m", "aliases": ["m"], "path": "/m"}}, "model.aliases holds 'm'"),
        ({"listen": {"http": "0.0.0.0:8000"}}, "listen.allow_plaintext"),
        ({"listen": {"admin": "0.0.0.0:8001"}}, "listen.admin is '0.0.0.0:8001', not a loopback address"),
        ({"listen": {"admin": "0.0.0.0:8001"}}, "set listen.admin.tls, or listen.admin.allow_plaintext: true"),
        ({"listen": {"admin": "8001"}}, "listen.admin.address is '8001'"),
        ({"listen": {"admin": {"adress": "127.0.0.1:1"}}}, "did you mean address?"),
        ({"worker_tls": {}}, "worker_tls.ca_file is missing"),
        ({"listen": {"http": "127.0.0.1:80", "admin": "127.0.0.1:80"}}, "give each its own port"),
    ],
)
def test_a_wrong_value_names_itself_and_what_is_allowed(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    assert expected in problem(tmp_path, GOOD | values)


def test_header_names_are_folded_and_one_can_be_switched_off(tmp_path: Path) -> None:
    headers = {"parent": "My_Parent", "codex_session": "", "others": ["X-Correlation-ID", "x-session-id"]}

    names = load_settings(write(tmp_path, GOOD | {"affinity": {"headers": headers}}), {}).affinity.headers

    assert (names.parent, names.codex_session) == ("my-parent", "")
    assert names.others == ("x-correlation-id", "x-session-id")


@pytest.mark.parametrize(
    "listen",
    [
        {"http": "0.0.0.0:8000", "allow_plaintext": True},
        {"http": "10.0.0.1:8000", "tls": {"certificate_file": "/c", "key_file": "/k"}},
        {"http": "[::1]:8000"},
        {"http": "0.0.0.0:8000", "allow_plaintext": True, "allow_anonymous": True},
        {"http": "127.0.0.1:1", "admin": {"address": "0.0.0.0:2", "allow_plaintext": True}},
        {"http": "127.0.0.1:1", "admin": {"address": "0.0.0.0:2", "tls": {"certificate_file": "/c", "key_file": "/k"}}},
        {"http": "localhost:8000", "allow_anonymous": True},
    ],
)
def test_a_listener_that_is_protected_may_start(tmp_path: Path, listen: dict[str, Any]) -> None:
    assert load_settings(write(tmp_path, GOOD | {"listen": listen}), {}).listen.http == listen["http"]


def warnings(folder: Path, listen: dict[str, Any]) -> str:
    return " ".join(load_settings(write(folder, GOOD | {"listen": listen}), {}).listen.warnings)


def test_what_is_left_open_is_warned_of(tmp_path: Path) -> None:
    tls = {"certificate_file": "/c", "key_file": "/k"}

    assert warnings(tmp_path, {"allow_anonymous": True, "allow_plaintext": True}) == "", "loopback is this machine's"
    assert warnings(tmp_path, {"http": "0.0.0.0:1", "tls": tls}) == ""
    assert "listen.http is '0.0.0.0:1', without TLS" in warnings(
        tmp_path, {"http": "0.0.0.0:1", "allow_plaintext": True}
    )
    assert "listen.grpc is '0.0.0.0:1', without TLS" in warnings(
        tmp_path, {"grpc": "0.0.0.0:1", "allow_plaintext": True}
    )
    assert "listen.allow_anonymous is true" in warnings(
        tmp_path, {"http": "0.0.0.0:1", "tls": tls, "allow_anonymous": True}
    )
    assert "listen.admin is '0.0.0.0:1', without TLS" in warnings(
        tmp_path, {"admin": {"address": "0.0.0.0:1", "allow_plaintext": True}}
    )


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path / "nothing.yaml", {})
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(SettingsError, match=r"broken\.yaml is not YAML"):
        load_settings(broken, {})
    broken.write_text("- a")
    with pytest.raises(SettingsError, match="must be a mapping"):
        load_settings(broken, {})


def test_a_secret_is_read_from_its_file_without_the_lines_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hush\n")
    assert read_secret(file, "auth.jwt.secret_file") == b"hush"

    file.write_text("\n")
    with pytest.raises(SettingsError, match=r"auth\.jwt\.secret_file is .* the file is empty"):
        read_secret(file, "auth.jwt.secret_file")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_secret(tmp_path / "nothing", "auth.jwt.secret_file")


def test_the_settings_are_those_of_the_golden_file() -> None:
    assert schema_of(EdgeSettings) == GOLDEN[EdgeSettings].read_text(), "run `make schemas`, and review the change"
