"""The chart's values: what is unknown or wrong is refused before anything is rendered, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendering import CHART, Release, template
from tests.deploy.values_schema import FILE, VALUES, values_schema


def test_the_schema_is_the_one_that_the_settings_make() -> None:
    assert values_schema() == FILE.read_text(), "run `make schemas`"


def test_every_value_of_the_chart_is_in_the_schema_and_has_a_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert values.keys() == VALUES.keys() - {"global"}
    missing = [path for name, schema in VALUES.items() for path in without_default(schema, values.get(name), name)]
    # null, a pool's own keys, and what has no default because its absence says something.
    assert missing == ["global"]


def without_default(schema: dict[str, Any], value: Any, path: str) -> list[str]:
    if value is None:
        return [path]
    members = schema.get("properties", {})
    if path.rpartition(".")[2] in ("requests", "limits", "settings"):
        return []
    return [one for name, inner in members.items() for one in without_default(inner, value.get(name), f"{path}.{name}")]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("edgee.replicas=1", "edgee"),
        ("edge.replica=1", "replica"),
        ("edge.replicas=0", "/edge/replicas"),
        ("edge.replicas=two", "/edge/replicas"),
        ("edge.resources.limits=null", "limits"),
        ("edge.resources.limits.cpu=null", "cpu"),
        ("edge.settings.router.tpye=conversation", "tpye"),
        ("edge.settings.router.type=random", "/edge/settings/router/type"),
        ("edge.settings.keys_file=/mine", "keys_file"),
        ("edge.settings.listen.http=0.0.0.0:1", "listen"),
        ("pools.context.role=both", "role"),
        ("pools.context.settings.tensor_parallel_size=2", "tensor_parallel_size"),
        ("pools.context.settings.kv_cache_config.host_cache_size=1", "host_cache_size"),
        ("pools.context.settings.scheduler.max_batch_size=0", "/settings/scheduler/max_batch_size"),
        ("pools.context.hostTier=64GB", "hostTier"),
        ("poolDefaults.device=gpu", "device"),
        ("model.source=s3", "/model/source"),
        ("tls.internal.enabled=maybe", "/tls/internal/enabled"),
        ("gateway.httpRoute.timeout=ever", "timeout"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused_by_its_place(executable: Path, given: str, named: str) -> None:
    done = template(executable, (), "--set", given)

    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("model.source=pvc", "model.pvc.claimName is missing"),
        ("model.source=image", "model.image.reference is missing"),
        ("model.source=hub", "model.hub.repository is missing"),
        ("keys.create=false", "keys.existingWorkerSecret is missing"),
        ("keys.create=false,keys.existingWorkerSecret=a", "keys.existingSecret is missing"),
        ("tls.clients.enabled=true", "set tls.clients.secretName, or tls.clients.issuerRef.name"),
        ("tls.internal.enabled=true", "set tls.internal.workerSecretName, or tls.internal.issuerRef.name"),
        ("ingress.enabled=true", "ingress.hosts is empty"),
        ("gateway.httpRoute.enabled=true", "gateway.httpRoute.parentRefs is empty"),
        ("gateway.grpcRoute.enabled=true", "edge.grpc is false"),
        ("pools.generation=null", "no worker that generates"),
        ("pools.context.replicas=0", "no worker for prompts"),
        ("pools.Bad.replicas=1", "pools.Bad"),
        ("pools.context.hosts=2", "it must divide tensorParallelSize, 1"),
        ("pools.context.diskTier.cacheSize=1Gi", "pools.context.diskTier.volumeSize is missing"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_what_to_do(executable: Path, given: str, said: str) -> None:
    done = template(executable, (), "--set", given)

    assert done.returncode != 0
    assert said in done.stderr


def test_a_settings_own_sizes_and_large_numbers_come_through_whole(executable: Path) -> None:
    release = Release.render(
        executable,
        (),
        "--set",
        "pools.context.hostTier=64Gi,pools.context.settings.kv_cache_config.max_tokens=123456789",
        "--set",
        "edge.settings.limits.body_bytes=268435456,edge.settings.router.kv_index_max_bytes=4GiB",
    )
    read = {pod.owner["metadata"]["name"]: release.settings(pod) for pod in release.pods if not pod.is_job}

    cache = read["r-kinroute-context"]["kv_cache_config"]
    assert (cache["host_cache_size"], cache["max_tokens"]) == ("64GiB", 123456789)
    edge = read["r-kinroute-edge"]
    assert (edge["limits"]["body_bytes"], edge["router"]["kv_index_max_bytes"]) == (268435456, "4GiB")


def test_what_a_pool_does_not_say_is_said_by_the_defaults_of_pools(executable: Path) -> None:
    release = Release.render(
        executable, (), "--set", "poolDefaults.drainTimeoutSeconds=7,pools.context.drainTimeoutSeconds=9"
    )
    read = {pod.owner["metadata"]["name"]: release.settings(pod) for pod in release.pods if not pod.is_job}

    assert read["r-kinroute-context"]["drain_timeout_s"] == 9
    assert read["r-kinroute-generation"]["drain_timeout_s"] == 7
