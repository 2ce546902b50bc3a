"""What the chart renders to is what Kubernetes takes, and holds what every pod must have."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.rendering import CHART, SETS, Manifest, Release, run, template

OLDEST = re.findall(r"\d+\.\d+", yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"])[0]
VERSIONS = (OLDEST, "1.37")
RANDOM = re.compile(r"[{(|]-? *(rand[A-Z]\w+|gen[A-Z]\w+|uuidv4|lookup|now|htpasswd|bcrypt|derivePassword)\b")
"""What a template may not call: its answers differ from one rendering to the next."""
PREFIX = "app.kubernetes.io/"
PUBLIC = {
    "leaderworkerset.x-k8s.io/v1",
    "cert-manager.io/v1",
    "gateway.networking.k8s.io/v1",
    "monitoring.coreos.com/v1",
}
"""Whose kinds Kubernetes does not know by itself; `test_custom_resources` looks at them."""


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_helm_finds_nothing_to_complain_of(executable: Path, values: tuple[str, ...]) -> None:
    files = [argument for name in values for argument in ("--values", str(CHART / name))]

    done = run(executable, "lint", "--strict", str(CHART), *files)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(releases: Mapping[str, Release], version: str) -> None:
    seen: set[str] = set()
    for manifest in (one for release in releases.values() for one in release.manifests):
        text = json.dumps(manifest, sort_keys=True)
        if manifest["apiVersion"] in PUBLIC or text in seen:
            continue
        seen.add(text)
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_pods_of_groups(releases: Mapping[str, Release], version: str) -> None:
    for pod in releases["multihost"].pods:
        if pod.owner["kind"] == "LeaderWorkerSet":
            made = {"metadata": {"labels": dict(pod.labels)}, "spec": pod.spec}
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": made},
                version,
                strict=True,
            )


def test_a_wrong_field_is_seen() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [], "tolerate": 1}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, OLDEST, strict=True)


def test_the_same_values_render_the_same_twice(executable: Path) -> None:
    first, second = (template(executable, SETS["mtls"]).stdout for _ in range(2))

    assert first == second
    assert not RANDOM.search(templates())


def templates() -> str:
    return "".join(file.read_text() for file in (CHART / "templates").iterdir())


def test_no_container_is_without_limits_and_rights_that_are_few(release: Release) -> None:
    for pod in release.pods:
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"]
        assert security["fsGroup"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        for container in pod.containers:
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_container_that_serves_is_probed(release: Release) -> None:
    for pod in release.pods:
        if pod.is_job:
            continue
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = pod.main[name]
            assert pod.is_follower == ("exec" in probe)
            if not pod.is_follower:
                assert probe["httpGet"]["port"] == "admin"
                assert "admin" in pod.ports


def test_services_do_not_become_settings(release: Release) -> None:
    """Kubernetes would tell each pod of every Service in variables such as KINROUTE_EDGE_PORT, which are settings."""
    assert all(pod.spec["enableServiceLinks"] is False for pod in release.pods)


def test_only_the_job_that_makes_keys_speaks_to_kubernetes_and_of_secrets_alone(release: Release) -> None:
    for pod in release.pods:
        assert pod.spec["automountServiceAccountToken"] is pod.is_job
        assert pod.spec["serviceAccountName"] in {one["metadata"]["name"] for one in release.of("ServiceAccount")}
    rules = [rule for role in release.of("Role") for rule in role["rules"]]
    assert all(rule["resources"] == ["secrets"] and rule["verbs"] in (["create"], ["get"]) for rule in rules)
    assert all("resourceNames" in rule for rule in rules if rule["verbs"] == ["get"])
    assert not release.of("ClusterRole")


def test_everything_that_selects_selects_what_it_is_meant_for(release: Release) -> None:
    for manifest, selector, component in selectors(release):
        selected = [pod for pod in release.pods if pod.carries(selector)]
        assert selected, f"{manifest['kind']} {manifest['metadata']['name']} selects nothing"
        assert {pod.role for pod in selected} == {component}


def selectors(release: Release) -> Iterator[tuple[Manifest, Mapping[str, str], str]]:
    """Who selects pods, by which labels, and of which part they must be."""
    for one in release.of("Service"):
        yield one, one["spec"]["selector"], one["metadata"]["labels"][PREFIX + "component"].removesuffix("-admin")
    for one in release.of("Deployment") + release.of("StatefulSet"):
        labels = one["spec"]["template"]["metadata"]["labels"]
        yield one, one["spec"]["selector"]["matchLabels"], labels[PREFIX + "component"]
    for one in release.of("PodDisruptionBudget"):
        yield (
            one,
            one["spec"]["selector"]["matchLabels"],
            "edge" if one["metadata"]["name"].endswith("edge") else "worker",
        )
    for one in release.of("NetworkPolicy"):
        yield one, one["spec"]["podSelector"]["matchLabels"], one["metadata"]["name"].rpartition("-")[2]
    for one in release.of("PodMonitor"):
        yield one, one["spec"]["selector"]["matchLabels"], "worker"
    for pod in release.pods:
        for spread in pod.spec.get("topologySpreadConstraints", ()):
            assert pod.carries(spread["labelSelector"]["matchLabels"])


def test_a_controller_selects_its_own_pods_alone(release: Release) -> None:
    for one in release.of("Deployment") + release.of("StatefulSet"):
        chosen = [pod for pod in release.pods if pod.carries(one["spec"]["selector"]["matchLabels"])]
        assert [pod.owner["metadata"]["name"] for pod in chosen] == [one["metadata"]["name"]]


def test_every_named_port_is_one_of_the_pods_behind_it(release: Release) -> None:
    for service in release.of("Service"):
        pods = [pod for pod in release.pods if pod.carries(service["spec"]["selector"]) and not pod.is_follower]
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in pod.ports for pod in pods)
    for policy in release.of("NetworkPolicy"):
        inward = list(policy["spec"]["ingress"])
        pods = [pod for pod in release.pods if pod.carries(policy["spec"]["podSelector"]["matchLabels"])]
        named = {port["port"] for rule in inward for port in rule.get("ports", ())}
        assert all(named <= pod.ports.keys() for pod in pods if not pod.is_follower)


def test_the_control_surface_is_not_behind_the_service_of_callers(release: Release) -> None:
    [service] = [one for one in release.of("Service") if one["spec"].get("clusterIP") != "None"]

    assert {port["targetPort"] for port in service["spec"]["ports"]} <= {"http", "grpc"}


def test_workers_are_reached_by_edges_and_by_each_other_alone(releases: Mapping[str, Release]) -> None:
    release = releases["mtls"]
    workers, edges = ([pod for pod in release.pods if pod.role == part] for part in ("worker", "edge"))
    policy = release.one("NetworkPolicy", "worker")["spec"]
    for rule in policy["ingress"]:
        for source in rule["from"]:
            allowed = source.get("podSelector", {}).get("matchLabels")
            ports = {port["port"] for port in rule.get("ports", ())}
            if allowed is None:
                assert ports == {"admin"}
            elif all(pod.carries(allowed) for pod in edges):
                assert ports == {"grpc"}
            else:
                assert all(pod.carries(allowed) for pod in workers)
                assert not ports
    edge = release.one("NetworkPolicy", "edge")["spec"]
    [callers] = [rule for rule in edge["ingress"] if {"port": "http", "protocol": "TCP"} in rule["ports"]]
    assert callers["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "agents"}}}]


def test_an_edge_goes_when_its_streams_have_ended_and_not_before_another_is_ready(release: Release) -> None:
    deployment = release.one("Deployment", "edge")
    [pod] = [pod for pod in release.pods if pod.role == "edge"]
    before_s = pod.main.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)

    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert pod.spec["terminationGracePeriodSeconds"] == before_s + release.settings(pod)["drain_timeout_s"] + 5


def test_changed_settings_start_new_pods(executable: Path) -> None:
    before, after = (
        Release.render(
            executable, (), "--set", f"edge.settings.limits.messages={number},pools.context.replicas={number}"
        )
        for number in (2, 3)
    )

    assert pod_annotations(before, "edge") != pod_annotations(after, "edge")
    assert pod_annotations(before, "generation") == pod_annotations(after, "generation")


def pod_annotations(release: Release, name: str) -> Any:
    [owner] = [
        one
        for kind in ("Deployment", "StatefulSet")
        for one in release.of(kind)
        if one["metadata"]["name"].endswith(name)
    ]
    return owner["spec"]["template"]["metadata"]["annotations"]


def test_an_autoscaled_edge_has_no_number_of_its_own(releases: Mapping[str, Release]) -> None:
    release = releases["h200"]
    [scaler] = release.of("HorizontalPodAutoscaler")

    assert "replicas" not in release.one("Deployment", "edge")["spec"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == release.one("Deployment", "edge")["metadata"]["name"]
    assert [one["type"] for one in scaler["spec"]["metrics"]] == ["Resource", "Pods"]
    [edge] = [pod for pod in release.pods if pod.role == "edge"]
    assert release.settings(edge)["limits"]["replicas"] == scaler["spec"]["maxReplicas"]


def test_each_rank_on_gpus_has_its_own(releases: Mapping[str, Release]) -> None:
    gpus = {
        (name, pod.labels["kinroute/pool"], pod.is_follower): pod.main["resources"]["limits"]["nvidia.com/gpu"]
        for name in ("h200", "multihost")
        for pod in releases[name].pods
        if pod.role == "worker"
    }

    assert gpus == {
        ("h200", "context", False): 2,
        ("h200", "generation", False): 4,
        ("multihost", "context", False): 8,
        ("multihost", "generation", False): 8,
        ("multihost", "generation", True): 8,
    }


def test_rules_and_dashboards_come_out_as_they_lie_in_the_chart(executable: Path, tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    for folder in ("alerts", "dashboards"):
        shutil.rmtree(chart / folder, ignore_errors=True)
        (chart / folder).mkdir()
    rule = {"alert": "Hot", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }} is {{ $value }}"}}
    (chart / "alerts" / "one.yaml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    (chart / "alerts" / "two.yaml").write_text(yaml.safe_dump({"groups": [{"name": "two", "rules": []}]}))
    dashboard = json.dumps({"title": "{{instance}}", "panels": []}, indent=2)
    (chart / "dashboards" / "cache.json").write_text(dashboard)

    release = Release.render(executable, ("values-h200.yaml",), chart=chart)

    [rules] = release.of("PrometheusRule")
    assert rules["spec"]["groups"] == [{"name": "one", "rules": [rule]}, {"name": "two", "rules": []}]
    packed = release.one("ConfigMap", "dashboard-cache")
    assert json.loads(packed["data"]["cache.json"]) == json.loads(dashboard)
    assert packed["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_rules_and_dashboards_that_there_are_are_packed(releases: Mapping[str, Release]) -> None:
    release = releases["h200"]
    groups = [
        group
        for file in sorted((CHART / "alerts").glob("*.yaml"))
        for group in yaml.safe_load(file.read_text())["groups"]
    ]
    files = {file.name: json.loads(file.read_text()) for file in (CHART / "dashboards").glob("*.json")}

    assert [group for rule in release.of("PrometheusRule") for group in rule["spec"]["groups"]] == groups
    packed = {
        name: json.loads(content)
        for one in release.of("ConfigMap")
        for name, content in one["data"].items()
        if name.endswith(".json")
    }
    assert packed == files


def test_notes_say_how_to_send_the_first_request(executable: Path) -> None:
    done = run(executable, "install", "r", str(CHART), "--namespace", "agents", "--dry-run=client")

    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "get secret r-kinroute-api-key" in notes
    assert "/v1/chat/completions" in notes
    assert '"model": "smollm2-135m-instruct"' in notes
