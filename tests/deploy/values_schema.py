"""The schema of the chart's values, written out as deploy/chart/values.schema.json by `make schemas`.

What `edge.settings` and a pool's `settings` may hold comes from the settings classes, less what the chart fills in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from configuration.reading import Section
from edge.settings import EdgeSettings
from worker.settings import WorkerSettings

FILE = Path(__file__).parents[2] / "deploy" / "chart" / "values.schema.json"
EDGE_FILLED = {
    "": ("listen", "model", "context_servers", "generation_servers", "worker_tls", "keys_file", "drain_timeout_s")
}
OF_WORKER = ("model", "served_model_name", "role", "tensor_parallel_size", "device", "listen", "keys_file")
WORKER_FILLED = {
    "": (*OF_WORKER, "drain_timeout_s"),
    "Group": ("token_file", "control_port"),
    "KvTransfer": ("listen_host", "allowed_networks", "tls"),
    "KvCacheConfig": ("host_cache_size", "disk_cache_size", "disk_cache_path", "recording_dir", "recording_max_bytes"),
}
"""By class, "" being the settings themselves: what templates/_edge.tpl and _worker.tpl fill in."""

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "maxLength": 253, "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?"
SIZE: Schema = {"type": "string", "pattern": "^[0-9]+(Ki|Mi|Gi|Ti)$"}
SIZE_OR_NONE: Schema = {"type": "string", "pattern": "^([0-9]+(Ki|Mi|Gi|Ti))?$"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}
SHARE: Schema = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}
PULL: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}


def number(least: int, most: int | None = None) -> Schema:
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def section(members: Mapping[str, Schema], **more: Any) -> Schema:
    """An object with these members and no others."""
    return {"type": "object", "additionalProperties": False, "properties": dict(members), **more}


IMAGE = section({"repository": TEXT, "tag": TEXT, "digest": TEXT, "pullPolicy": PULL})
AMOUNTS: Schema = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [{"type": "string", "pattern": f"^{QUANTITY}$"}, {"type": "number", "exclusiveMinimum": 0}]
    },
}
RESOURCES = section({"requests": AMOUNTS, "limits": AMOUNTS | {"required": ["cpu", "memory"]}}, required=["limits"])
ISSUER = section({"name": NAME, "kind": {"enum": ["Issuer", "ClusterIssuer"]}, "group": TEXT})
SECRET_FILES: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$"},
    "additionalProperties": section({"secretName": NAME}, required=["secretName"]),
}
PLACED: dict[str, Schema] = {
    "resources": RESOURCES,
    "podDisruptionBudget": section({"enabled": FLAG, "maxUnavailable": SHARE}),
    "topologySpread": FLAG,
    "podAnnotations": TEXTS,
    "nodeSelector": TEXTS,
    "tolerations": many(OBJECT),
    "affinity": OBJECT,
    "priorityClassName": NAME,
    "secretFiles": SECRET_FILES,
}
POOL: dict[str, Schema] = {
    "role": {"enum": ["context", "generation", "aggregated"]},
    "replicas": number(0),
    "tensorParallelSize": number(1, 64),
    "hosts": number(1, 64),
    "device": {"enum": ["cpu", "cuda"]},
    "gpuResource": TEXT,
    "settings": {"$ref": "#/$defs/WorkerSettings"},
    "drainTimeoutSeconds": number(0),
    "allowedNetworks": many(TEXT),
    "sharedMemory": SIZE,
    "hostTier": SIZE_OR_NONE,
    "diskTier": section({"cacheSize": SIZE_OR_NONE, "volumeSize": SIZE_OR_NONE, "storageClassName": NAME}),
    "recordings": section({"maxSize": SIZE_OR_NONE}),
    "runtimeClassName": NAME,
    "env": many(section({"name": TEXT, "value": TEXT, "valueFrom": OBJECT}, required=["name"])),
} | PLACED
EDGE: dict[str, Schema] = {
    "image": IMAGE,
    "replicas": number(1),
    "settings": {"$ref": "#/$defs/EdgeSettings"},
    "grpc": FLAG,
    "preStopSeconds": number(0, 600),
    "drainTimeoutSeconds": number(0),
    "service": section(
        {
            "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            "port": number(1, 65535),
            "grpcPort": number(1, 65535),
            "annotations": TEXTS,
        }
    ),
    "autoscaling": section(
        {
            "enabled": FLAG,
            "minReplicas": number(1),
            "maxReplicas": number(1),
            "targetCPUUtilizationPercentage": number(1, 100),
            "inFlight": section({"enabled": FLAG, "targetAverageValue": TEXT}),
        }
    ),
} | PLACED
MODEL: dict[str, Schema] = {
    "name": {"type": "string", "minLength": 1},
    "aliases": many({"type": "string", "minLength": 1}),
    "source": {"enum": ["embedded", "pvc", "image", "hub"]},
    "subPath": {"type": "string", "pattern": "^([^/].*)?$"},
    "pvc": section({"claimName": NAME}),
    "image": section({"reference": TEXT, "pullPolicy": PULL}),
    "hub": section(
        {
            "repository": {"type": "string", "pattern": "^([^/]+/[^/]+)?$"},
            "revision": {"type": "string", "minLength": 1},
            "tokenSecret": section({"name": NAME, "key": TEXT}),
            "sizeLimit": SIZE,
        }
    ),
}
WATCHED = {"enabled": FLAG, "labels": TEXTS}
ROUTE = {"enabled": FLAG, "parentRefs": many(OBJECT), "hostnames": many(TEXT)}
VALUES: dict[str, Schema] = {
    "nameOverride": NAME,
    "fullnameOverride": NAME,
    "clusterDomain": {"type": "string", "minLength": 1},
    "listenHost": {"type": "string", "minLength": 1},
    "imagePullSecrets": many(section({"name": NAME}, required=["name"])),
    "commonLabels": TEXTS,
    "model": section(MODEL),
    "edge": section(EDGE),
    "worker": section({"image": IMAGE}),
    "poolDefaults": section(POOL),
    "pools": {"type": "object", "additionalProperties": {"anyOf": [section(POOL), {"type": "null"}]}},
    "keys": section(
        {
            "create": FLAG,
            "existingSecret": NAME,
            "existingWorkerSecret": NAME,
            "existingGroupTokenSecret": NAME,
            "job": section({"resources": RESOURCES}),
        }
    ),
    "tls": section(
        {
            "clients": section({"enabled": FLAG, "secretName": NAME, "dnsNames": many(TEXT), "issuerRef": ISSUER}),
            "internal": section(
                {"enabled": FLAG, "edgeSecretName": NAME, "workerSecretName": NAME, "issuerRef": ISSUER}
            ),
        }
    ),
    "networkPolicy": section(
        {
            "enabled": FLAG,
            "clients": many(OBJECT),
            "monitoring": many(OBJECT),
            "edgeEgress": many(OBJECT),
            "workerEgress": many(OBJECT),
        }
    ),
    "ingress": section(
        {"enabled": FLAG, "className": NAME, "annotations": TEXTS, "hosts": many(TEXT), "tlsSecretName": NAME}
    ),
    "gateway": section({"httpRoute": section(ROUTE | {"timeout": DURATION}), "grpcRoute": section(ROUTE)}),
    "monitoring": section(
        {
            "serviceMonitor": section(WATCHED | {"interval": DURATION}),
            "podMonitor": section(WATCHED | {"interval": DURATION}),
            "rules": section(WATCHED),
            "dashboards": section(WATCHED),
        }
    ),
    "serviceAccount": section({"annotations": TEXTS}),
    "global": OBJECT,
}


def values_schema() -> str:
    """As the file holds it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart kinroute",
        **section(VALUES),
        "$defs": _definitions(EdgeSettings, EDGE_FILLED) | _definitions(WorkerSettings, WORKER_FILLED),
    }
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def _definitions(settings: type[Section], filled: Mapping[str, Sequence[str]]) -> dict[str, Schema]:
    """Of the settings and all their sections, each under its class's name behind the settings' own."""
    whole = deepcopy(settings.model_json_schema())
    sections: dict[str, Schema] = {"": whole} | whole.pop("$defs", {})
    for name, keys in filled.items():
        for key in keys:
            del sections[name]["properties"][key]
            sections[name]["required"] = [one for one in sections[name].get("required", ()) if one not in keys]
    prefix = settings.__name__
    return {prefix + (f".{name}" if name else ""): _plain(one, prefix) for name, one in sections.items()}


def _plain(schema: Any, prefix: str, *, names: bool = False) -> Any:
    """Without what says nothing of validity. `names`: the keys are those of members, not of the schema."""
    if isinstance(schema, list):
        return [_plain(one, prefix) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{prefix}.{schema['$ref'].removeprefix('#/$defs/')}"}
    plain = {}
    for key, value in schema.items():
        if names or key not in {"default", "title", "description", "format"}:
            plain[key] = _plain(value, prefix, names=key == "properties" and not names)
    if not plain.get("required", True):
        del plain["required"]
    return plain


def main() -> None:
    FILE.write_text(values_schema())


if __name__ == "__main__":
    main()
