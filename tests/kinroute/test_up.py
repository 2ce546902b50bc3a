"""`kinroute up` with the embedded model: real processes, the real model, the real `openai` client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
import yaml

from edge.keyring import Keyring
from tests.openengine.stub import Stub

GONE_S = 30.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Home:
    """A user's XDG folders and the ports that this test's system uses."""

    folder: Path
    cache: Path
    port: int
    admin_port: int

    @property
    def environment(self) -> dict[str, str]:
        folders = {"XDG_CONFIG_HOME": self.folder / "config", "XDG_STATE_HOME": self.folder / "state"}
        folders["XDG_CACHE_HOME"] = self.cache
        return os.environ | {variable: str(folder) for variable, folder in folders.items()}

    @property
    def keys_file(self) -> Path:
        return self.folder / "config" / "kinroute" / "keys.json"

    def key(self) -> str:
        """The one that `up` tells; made where it never ran."""
        self.keys_file.parent.mkdir(parents=True, exist_ok=True)
        return Keyring.open(self.keys_file).local_key

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "kinroute", *arguments]

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        ports = ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        return subprocess.Popen(
            self.command("up", *ports, *arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, timeout=GONE_S, check=False
        )


def wait_greeting(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    said = ""
    for line in process.stdout:
        said += line
        if "Ctrl-C" in line:
            return said
    raise AssertionError(f"up ended before it was ready: {process.stderr.read()}")


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert not alive, alive


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, cache_home: Path) -> Home:
    return Home(tmp_path_factory.mktemp("home"), cache_home, free_port(), free_port())


@pytest.fixture
def running(home: Home) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = home.up()
    try:
        yield process, wait_greeting(process)
    finally:
        family = family_of(process) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=GONE_S)
        assert_gone(family)


def key_in(greeting: str) -> str:
    found = re.search(r"API key: (\S+)", greeting)
    assert found
    return found[1]


def test_it_serves_the_embedded_model_refuses_a_second_start_plays_the_demo_and_hands_on_new_keys(
    home: Home, running: tuple[subprocess.Popen[str], str]
) -> None:
    process, greeting = running
    with openai.OpenAI(base_url=f"http://127.0.0.1:{home.port}/v1", api_key=key_in(greeting), max_retries=0) as client:
        answer = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "What is the capital of France? One word."}],
            max_tokens=8,
            temperature=0,
        )
    assert "Paris" in (answer.choices[0].message.content or "")

    grpc_address = re.search(r"OpenEngine \(gRPC\) is served at (\S+)", greeting)
    assert grpc_address
    with Stub(grpc_address[1], (("x-api-key", key_in(greeting)),)) as stub:
        assert stub.health(stub.HealthRequest()).state == 2  # READY

    second = home.run("up", "--port", str(free_port()))
    assert second.returncode == 1
    assert f"already runs here, at http://127.0.0.1:{home.port}" in second.stderr

    demo = home.run("demo")
    assert demo.returncode == 0, demo.stderr
    cached = [
        int(row[-1]) for row in (re.findall(r"\d+", line) for line in demo.stdout.splitlines() if "127.0.0.1" in line)
    ]
    assert len(cached) == 5, demo.stdout
    assert cached[0] == 0
    assert min(cached[3:]) > 0, "the parent's second turn and the sub-agent's second turn reuse what is cached"
    assert demo.stdout.count("35 → 1 ") >= 2, "both sub-agents were demoted when the parent returned"
    assert "priority 1 → 35" in " ".join(demo.stdout.split()), "the one that came back is kept again"

    assert home.run("keys", "rotate").returncode == 0
    ids = {key["id"] for key in json.loads(home.run("keys", "list", "--json").stdout)["envelope_keys"]}
    end_s = time.monotonic() + GONE_S
    while {key["id"] for key in json.loads(worker_keys(process).read_text())["envelope_keys"]} != ids:
        assert time.monotonic() < end_s, "the workers' key file stays as it was"
        time.sleep(0.05)


def worker_keys(process: subprocess.Popen[str]) -> Path:
    """The key file that the workers of this system read."""
    configs = [argument for child in family_of(process) for argument in child.cmdline() if argument.endswith("-0.yaml")]
    return Path(yaml.safe_load(Path(configs[0]).read_text())["keys_file"])


def test_a_new_key_replaces_the_old_one_and_processes_end_even_when_up_is_killed(home: Home) -> None:
    old = home.key()
    process = home.up("--new-key")
    assert key_in(wait_greeting(process)) == home.key() != old
    assert home.keys_file.stat().st_mode & 0o777 == 0o600
    family = family_of(process)

    process.kill()

    process.communicate(timeout=GONE_S)
    assert_gone(family)


def test_ctrl_c_ends_every_process_and_the_next_start_has_the_key_of_the_one_before(home: Home) -> None:
    kept = home.key()
    process = home.up()
    assert key_in(wait_greeting(process)) == kept
    family = family_of(process)
    assert len(family) >= 6, "an edge, two launchers, three ranks"

    process.send_signal(signal.SIGINT)

    _, errors = process.communicate(timeout=GONE_S)
    assert process.returncode == 0, errors
    assert_gone(family)


def test_a_taken_port_is_named_with_what_to_do(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = home.run("up", "--port", str(port))
    assert refused.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in refused.stderr
    assert "--port" in refused.stderr


def test_the_demo_says_what_to_do_where_nothing_runs(home: Home) -> None:
    refused = home.run("demo")
    assert refused.returncode == 1
    assert "start it with scripts/run" in refused.stderr
