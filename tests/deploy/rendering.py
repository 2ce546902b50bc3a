"""Releases of the chart as parsed objects."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "chart"
SETS: dict[str, tuple[str, ...]] = {
    "default": (),
    "cpu": ("values-cpu.yaml",),
    "h200": ("values-h200.yaml",),
    "multihost": ("ci/multihost.yaml",),
    "mtls": ("ci/mtls.yaml",),
    "no-monitoring": ("ci/no-monitoring.yaml",),
    "gateway": ("ci/gateway.yaml",),
}
NAME, NAMESPACE = "r", "agents"

Manifest = dict[str, Any]


def run(executable: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([executable, *arguments], capture_output=True, text=True, check=False, timeout=60)


def template(
    executable: Path, values: Sequence[str] = (), *more: str, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    files = [argument for name in values for argument in ("--values", str(chart / name))]
    return run(executable, "template", NAME, str(chart), "--namespace", NAMESPACE, *files, *more)


@dataclass(frozen=True)
class Pod:
    """A pod as `owner` makes it. `labels` are those that others select it by."""

    owner: Manifest
    labels: Mapping[str, str]
    spec: Manifest
    is_follower: bool = False
    """It has no rank 0, which alone listens."""

    @property
    def is_job(self) -> bool:
        return bool(self.owner["kind"] == "Job")

    @property
    def role(self) -> str:
        """What `kinroute` runs here."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def main(self) -> Manifest:
        [container] = self.spec["containers"]
        found: Manifest = container
        return found

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.main.get("ports", ())}

    def carries(self, selector: Mapping[str, str]) -> bool:
        return all(self.labels.get(name) == value for name, value in selector.items())


@dataclass(frozen=True)
class Release:
    manifests: list[Manifest] = field(repr=False)

    @classmethod
    def render(cls, executable: Path, values: Sequence[str], *more: str, chart: Path = CHART) -> Release:
        done = template(executable, values, *more, chart=chart)
        assert done.returncode == 0, done.stderr
        return cls([one for one in yaml.safe_load_all(done.stdout) if one is not None])

    def of(self, kind: str) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        [found] = [one for one in self.of(kind) if one["metadata"]["name"].endswith(name)]
        return found

    @property
    def pods(self) -> list[Pod]:
        return list(self._pods())

    def _pods(self) -> Iterator[Pod]:
        for owner in self.manifests:
            spec = owner.get("spec", {})
            if owner["kind"] == "LeaderWorkerSet":
                # What its controller adds, see the labels in its documentation.
                index = "leaderworkerset.sigs.k8s.io/worker-index"
                for part, number in (("leaderTemplate", "0"), ("workerTemplate", "1")):
                    made = spec["leaderWorkerTemplate"][part]
                    yield Pod(owner, made["metadata"]["labels"] | {index: number}, made["spec"], number != "0")
            elif "template" in spec:
                yield Pod(owner, spec["template"]["metadata"]["labels"], spec["template"]["spec"])

    def settings(self, pod: Pod) -> dict[str, Any]:
        """What the file holds that this pod's program reads."""
        [volume] = [one for one in pod.spec["volumes"] if one["name"] == "settings"]
        [content] = self.one("ConfigMap", volume["configMap"]["name"])["data"].values()
        found: dict[str, Any] = yaml.safe_load(content)
        return found
