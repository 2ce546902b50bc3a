"""Objects of others' kinds: against their published schemas where a package has them, else field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from cloudcoil.models.cert_manager.v1 import Certificate
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule, ServiceMonitor

from tests.deploy.rendering import Manifest, Release

PUBLISHED = {"Certificate": Certificate, "PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule} | {
    "ServiceMonitor": ServiceMonitor
}
OWN = {"LeaderWorkerSet", "HTTPRoute", "GRPCRoute"}
"""Asserted on below: no registry that Python's client reaches has their schemas."""


def strict(schema: Any) -> Any:
    """Objects take no members but those that are named."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(one) for key, one in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.mark.parametrize("kind", PUBLISHED)
def test_it_is_what_the_published_schema_says(releases: Mapping[str, Release], kind: str) -> None:
    schema = strict(PUBLISHED[kind].model_json_schema(by_alias=True))
    validator = jsonschema.Draft202012Validator(schema)
    found = [one for release in releases.values() for one in release.of(kind)]
    if kind == "PrometheusRule" and not found:
        pytest.skip("there are no rules in deploy/chart/alerts")

    assert found
    for manifest in found:
        validator.validate(manifest)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(manifest | {"spec": manifest["spec"] | {"unheard": 1}})


def test_every_kind_that_kubernetes_does_not_have_is_looked_at_here(releases: Mapping[str, Release]) -> None:
    foreign = {
        one["kind"]
        for release in releases.values()
        for one in release.manifests
        if "." in one["apiVersion"].partition("/")[0] and not one["apiVersion"].partition("/")[0].endswith(".k8s.io")
    }

    assert foreign <= PUBLISHED.keys() | OWN


def test_without_monitoring_nothing_of_another_operator_is_needed(releases: Mapping[str, Release]) -> None:
    for name in ("default", "no-monitoring", "cpu"):
        assert not (PUBLISHED.keys() | OWN) & {one["kind"] for one in releases[name].manifests}


def test_a_monitor_finds_the_port_and_the_path_of_metrics(releases: Mapping[str, Release]) -> None:
    for name in ("h200", "multihost"):
        release = releases[name]
        [service_monitor], [pod_monitor] = release.of("ServiceMonitor"), release.of("PodMonitor")
        selector = service_monitor["spec"]["selector"]["matchLabels"]
        [service] = [one for one in release.of("Service") if selector.items() <= one["metadata"]["labels"].items()]
        [endpoint] = service_monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        [watched] = pod_monitor["spec"]["podMetricsEndpoints"]
        workers = [pod for pod in release.pods if pod.role == "worker" and not pod.is_follower]
        assert all(watched["port"] in pod.ports for pod in workers)
        assert endpoint["path"] == watched["path"] == "/metrics"


def test_a_group_has_a_pod_for_each_host_and_comes_and_goes_as_one(releases: Mapping[str, Release]) -> None:
    [group] = releases["multihost"].of("LeaderWorkerSet")
    spec: Manifest = group["spec"]

    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert spec.keys() == {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
    assert spec["replicas"] == 2
    # The leader is ready only once its followers are there.
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["rolloutStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
    }
    template = spec["leaderWorkerTemplate"]
    assert template.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert template["size"] == 2
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_ranks_of_a_group_find_each_other_by_what_the_leaderworkerset_says(releases: Mapping[str, Release]) -> None:
    pods = [pod for pod in releases["multihost"].pods if pod.owner["kind"] == "LeaderWorkerSet"]

    assert [pod.is_follower for pod in pods] == [False, True]
    for pod in pods:
        given = dict(one[2:].split("=") for one in pod.main["args"] if "=" in one)
        assert given["nnodes"] == "$(LWS_GROUP_SIZE)"
        assert given["node-rank"] == "$(LWS_WORKER_INDEX)"
        assert given["master-addr"] == "$(LWS_LEADER_ADDRESS)"
        settings = releases["multihost"].settings(pod)
        assert int(given["nproc-per-node"]) * 2 == settings["tensor_parallel_size"]
        # Rank 0 may drain as long as its deadline says, before torchrun kills it; then comes the pod's own end.
        assert settings["drain_timeout_s"] < int(given["shutdown-timeout"]) < pod.spec["terminationGracePeriodSeconds"]
    first, second = (pod.main for pod in pods)
    assert first["args"] == second["args"]


def test_routes_lead_to_the_ports_of_the_edges_service(releases: Mapping[str, Release]) -> None:
    release = releases["gateway"]
    [service] = [one for one in release.of("Service") if one["spec"].get("clusterIP") != "None"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for kind, port, rule_keys in (
        ("HTTPRoute", "http", {"matches", "timeouts", "backendRefs"}),
        ("GRPCRoute", "grpc", {"backendRefs"}),
    ):
        [route] = release.of(kind)
        assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
        assert route["spec"].keys() == {"parentRefs", "hostnames", "rules"}
        assert route["spec"]["parentRefs"][0]["name"] == "public"
        assert route["spec"]["parentRefs"][0].keys() <= {"name", "namespace", "sectionName"}
        [rule] = route["spec"]["rules"]
        assert rule.keys() == rule_keys
        assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": ports[port]}]
    [http] = release.of("HTTPRoute")
    assert http["spec"]["rules"][0]["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert http["spec"]["rules"][0]["timeouts"] == {"request": "3600s"}
