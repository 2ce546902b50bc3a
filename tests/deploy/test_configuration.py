"""What the chart writes down, the program takes: settings, flags, ports, probes, files and addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import edge.settings
import worker.settings
from configuration.addresses import split_address
from edge.http import admin as edge_admin
from edge.keyring import Keyring
from edge.settings import EdgeSettings
from kinroute.__main__ import main
from tests.deploy.rendering import NAMESPACE, Pod, Release
from tests.edge.http.harness import make_text_folder
from tests.edge.test_app import heard, running
from worker import admin as worker_admin
from worker.settings import WorkerSettings

POD_IP = "10.8.0.7"
FOLDERS = ("/model", "/etc/kinroute/keys", "/var/lib/kinroute/cache", "/var/lib/kinroute/recordings")
Settings = EdgeSettings | WorkerSettings


def parts(release: Release) -> Iterator[tuple[Pod, dict[str, Any]]]:
    """Pods of edges and workers, with what they read."""
    for pod in release.pods:
        if not pod.is_job:
            yield pod, release.settings(pod)


def moved(value: Any, root: Path) -> Any:
    """With all paths below `root`."""
    if isinstance(value, dict):
        return {key: moved(one, root) for key, one in value.items()}
    if isinstance(value, list):
        return [moved(one, root) for one in value]
    return f"{root}{value}" if isinstance(value, str) and value.startswith("/") else value


def loaded(pod: Pod, content: dict[str, Any], root: Path) -> Settings:
    """As the pod's own process reads it."""
    for folder in FOLDERS:
        (root / folder.removeprefix("/")).mkdir(parents=True, exist_ok=True)
    settings = moved(content, root)
    if pod.role == "edge":
        file = root / "edge.yaml"
        file.write_text(yaml.safe_dump(settings))
        return edge.settings.load_settings(file, environment(pod))
    model = Path(settings["model"])
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    file = root / "worker.yaml"
    file.write_text(yaml.safe_dump(settings))
    return worker.settings.load_settings(file, environment(pod))


def environment(pod: Pod) -> dict[str, str]:
    fields = {"status.podIP": POD_IP}
    return {
        one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in pod.main["env"]
    }


def test_the_program_takes_every_key_of_its_settings(release: Release, tmp_path: Path) -> None:
    for pod, content in parts(release):
        settings = loaded(pod, content, tmp_path)

        if isinstance(settings, WorkerSettings):
            assert settings.kv_transfer.listen_host == POD_IP
            assert settings.tensor_parallel_size > 0
        for listener in settings.listeners if isinstance(settings, WorkerSettings) else (*settings.listen.callers,):
            assert not listener.is_loopback


def test_ports_are_the_programs_own_defaults(release: Release) -> None:
    defaults = {
        "edge": {"http": EdgeSettings.model_fields["listen"].default.http},
        "worker": {"grpc": WorkerSettings.model_fields["listen"].default.grpc},
    }
    for kind, settings in (("edge", EdgeSettings), ("worker", WorkerSettings)):
        defaults[kind]["admin"] = settings.model_fields["listen"].default.admin.address
    for pod, content in parts(release):
        listen = content["listen"]
        listened = {name: listen[name] for name in ("http", "grpc") if name in listen}
        listened["admin"] = listen["admin"]["address"]
        ports = {name: split_address(address)[1] for name, address in listened.items()}
        assert pod.is_follower or pod.ports == ports
        for name, address in defaults[pod.role].items():
            assert ports[name] == split_address(address)[1]


def test_probes_ask_what_the_admin_listener_answers(release: Release) -> None:
    for pod, _ in parts(release):
        known = edge_admin.PROBES if pod.role == "edge" else worker_admin.PROBES
        if not pod.is_follower:
            assert {pod.main[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")} <= {
                *known
            }


def test_a_worker_is_not_killed_before_its_own_deadline_for_starting(release: Release, tmp_path: Path) -> None:
    for pod, content in parts(release):
        settings = loaded(pod, content, tmp_path)
        if isinstance(settings, WorkerSettings) and not pod.is_follower:
            probe = pod.main["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= settings.group.start_timeout_s
            assert pod.spec["terminationGracePeriodSeconds"] >= settings.drain_timeout_s + 10


def test_every_file_that_settings_name_is_mounted(release: Release) -> None:
    for pod, content in parts(release):
        mounts = [mount["mountPath"] for mount in pod.main["volumeMounts"]]
        config = pod.main["args"][-1]
        for path in (config, *paths(content)):
            assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        for container in pod.containers:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def paths(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for one in value.values():
            yield from paths(one)
    elif isinstance(value, list):
        for one in value:
            yield from paths(one)
    elif isinstance(value, str) and value.startswith("/"):
        yield value


def test_what_is_written_to_is_a_volume(release: Release) -> None:
    """The root of each container is read-only."""
    for pod, content in parts(release):
        writable = {mount["mountPath"] for mount in pod.main["volumeMounts"] if not mount.get("readOnly")}
        cache = content.get("kv_cache_config", {})
        assert {"/tmp"} | {cache[key] for key in ("disk_cache_path", "recording_dir") if key in cache} <= writable  # noqa: S108
        assert environment(pod)["HOME"] in writable
        assert ("/dev/shm" in writable) == (pod.role == "worker")  # noqa: S108


def test_secrets_are_closed_to_others(release: Release) -> None:
    secrets = [volume["secret"] for pod in release.pods for volume in pod.spec["volumes"] if "secret" in volume]

    assert secrets
    assert all(secret["defaultMode"] == 0o440 for secret in secrets)


def test_edges_dial_each_rank_0_by_its_name_in_its_service(release: Release) -> None:
    [(_, settings)] = [(pod, content) for pod, content in parts(release) if pod.role == "edge"]
    expected: dict[str, set[str]] = {"context": set(), "generation": set()}
    for pod, content in parts(release):
        if pod.role == "worker" and not pod.is_follower:
            owner = pod.owner
            name, replicas = owner["metadata"]["name"], owner["spec"]["replicas"]
            # A LeaderWorkerSet makes a headless Service of its own name, and its leaders as a StatefulSet's pods.
            service = owner["spec"].get("serviceName", name)
            made_by_chart = [one["metadata"]["name"] for one in release.of("Service")]
            assert (service in made_by_chart) == (owner["kind"] == "StatefulSet")
            roles = {"aggregated": ("context", "generation")}.get(content["role"], (content["role"],))
            for role in roles:
                expected[role] |= {
                    f"{name}-{index}.{service}.{NAMESPACE}.svc.cluster.local:{pod.ports['grpc']}"
                    for index in range(replicas)
                }

    assert set(settings["context_servers"]) == expected["context"]
    assert set(settings["generation_servers"]) == expected["generation"]


def test_certificates_are_shown_and_asked_for_on_both_sides(releases: Mapping[str, Release]) -> None:
    release = releases["mtls"]
    named = {one["spec"]["secretName"]: one["spec"]["dnsNames"] for one in release.of("Certificate")}
    mounted: dict[str, str] = {}
    for pod, _ in parts(release):
        for volume in pod.spec["volumes"]:
            if volume["name"].endswith("-tls"):
                mounted[f"{pod.role} {volume['name']}"] = volume["secret"]["secretName"]
    assert set(mounted.values()) == set(named)
    worker_name = named[mounted["worker internal-tls"]]
    for pod, content in parts(release):
        if pod.role == "edge":
            assert [content["worker_tls"]["server_name"]] == worker_name
            assert "allow_plaintext" not in content["listen"]
            assert {"certificate_file", "key_file", "ca_file"} <= content["worker_tls"].keys()
        else:
            assert [content["kv_transfer"]["tls"]["server_name"]] == worker_name
            assert "client_ca_file" in content["listen"]["tls"]
            assert "allow_plaintext" not in content["listen"]


def test_every_flag_is_the_commands(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is not known ends with 2; else a file, or a pod, is missed."""
    for pod in release.pods:
        arguments = pod.main["args"]
        if pod.main["command"] == ["torchrun"]:
            arguments = arguments[arguments.index("--module") + 2 :]
        if pod.is_job:
            assert main(arguments) == 1
            assert "This is no pod with a service account" in capsys.readouterr().err
        else:
            assert main(arguments) == 1
            assert f"{arguments[-1]}" in capsys.readouterr().err


def test_the_job_makes_the_secrets_that_are_mounted(release: Release) -> None:
    mounted = {
        volume["secret"]["secretName"]
        for pod in release.pods
        for volume in pod.spec["volumes"]
        if volume["name"] in ("keys", "group")
    }
    [*jobs] = [pod for pod in release.pods if pod.is_job]
    if not jobs:
        assert mounted == {"edge-keys", "worker-keys", "group-token"}
        return
    prefix = jobs[0].main["args"][2]
    [readable] = [
        rule["resourceNames"] for role in release.of("Role") for rule in role["rules"] if "get" in rule["verbs"]
    ]
    assert mounted <= set(readable)
    assert set(readable) == {f"{prefix}-{name}" for name in ("api-key", "keys", "worker-keys", "group-token")}


def test_a_model_of_the_hub_is_downloaded_with_flags_that_there_are(releases: Mapping[str, Release]) -> None:
    known = subprocess.run(
        [Path(sys.executable).with_name("hf"), "download", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for pod, content in parts(releases["multihost"]):
        [download] = pod.spec["initContainers"]
        flags = [one for one in download["args"] if one.startswith("--")]
        assert flags
        assert all(flag in known for flag in flags)
        assert download["command"] == ["hf"]
        folder = content["model"]["path"] if pod.role == "edge" else content["model"]
        assert download["args"][download["args"].index("--local-dir") + 1] == folder


def test_an_edge_runs_with_what_is_rendered_for_it(releases: Mapping[str, Release], tmp_path: Path) -> None:
    [(pod, content)] = [(pod, content) for pod, content in parts(releases["cpu"]) if pod.role == "edge"]
    settings = moved(content, tmp_path)
    Path(settings["keys_file"]).parent.mkdir(parents=True)
    key = Keyring.open(Path(settings["keys_file"])).local_key
    make_text_folder(Path(settings["model"]["path"]))
    file = Path(moved(pod.main["args"][-1], tmp_path))
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(settings))
    with running("bench.fake_worker", "--step-ms", "1") as fake:
        servers = json.dumps([heard(fake)["grpc"]])
        # Names of the cluster and ports are the only things that are not as in a pod.
        os_environment = (
            os.environ
            | environment(pod)
            | {
                "KINROUTE_EDGE_LISTEN__HTTP": "127.0.0.1:0",
                "KINROUTE_EDGE_LISTEN__ADMIN__ADDRESS": "127.0.0.1:0",
                "KINROUTE_EDGE_CONTEXT_SERVERS": servers,
                "KINROUTE_EDGE_GENERATION_SERVERS": servers,
            }
        )
        with running("kinroute", *pod.main["args"][:-1], str(file), environment=os_environment) as edge_process:
            listening = heard(edge_process)
            assert heard(edge_process) == {"event": "ready"}
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                path = pod.main[name]["httpGet"]["path"]
                assert httpx.get(f"http://{listening['admin']}{path}").status_code == 200
            answer = httpx.post(
                f"http://{listening['http']}/v1/completions",
                json={"model": settings["model"]["name"], "prompt": "Hi", "max_tokens": 3},
                headers={"Authorization": f"Bearer {key}"},
            )
            assert answer.json()["usage"]["completion_tokens"] == 3
