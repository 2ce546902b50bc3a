"""The edge as a process, in front of fake workers that speak EngineLink: start, serve, drain, stop."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import jwt
import openai
import pytest
import yaml

from bench.certificates import Authority
from bench.fake_engine import answer_token
from edge.keyring import Keyring
from openengine.v1 import server_pb2, service_pb2_grpc
from tests.edge.http.harness import make_text_folder

DEADLINE_S = 20.0
SECRET = "s" * 32


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The process's next line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended: {process.communicate()[1]}"
    news: dict[str, Any] = json.loads(line)
    return news


@contextmanager
def running(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@dataclass
class Edge:
    process: subprocess.Popen[str]
    url: str
    admin: str
    key: str
    clients: contextlib.ExitStack
    grpc: str = ""
    keys_file: str = ""

    def openai(self) -> openai.OpenAI:
        """Closed with the edge."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)
        return self.clients.enter_context(client)

    def settled_leaks(self) -> dict[str, int]:
        end_s = time.monotonic() + 5.0
        while True:
            leaks: dict[str, int] = httpx.get(f"{self.admin}/kinroute/v1/leaks").json()
            if not any(leaks.values()) or time.monotonic() > end_s:
                return leaks
            time.sleep(0.02)


def configure(folder: Path, context: list[str], generation: list[str], **more: Any) -> Path:
    Keyring.open(folder / "keys.json")
    file = folder / "edge.yaml"
    config = {
        "listen": {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "model": {"name": "tiny", "path": str(make_text_folder(folder / "text"))},
        "keys_file": str(folder / "keys.json"),
        "context_servers": context,
        "generation_servers": generation,
    }
    file.write_text(yaml.safe_dump(config | more))
    return file


@contextmanager
def edge_of(folder: Path, context: list[str], generation: list[str], **more: Any) -> Iterator[Edge]:
    file = configure(folder, context, generation, **more)
    with running("kinroute", "edge", "--config", str(file)) as process:
        listening = heard(process)
        assert listening["event"] == "listening"
        keys_file = more.get("keys_file", str(folder / "keys.json"))
        key = "" if keys_file is None else Keyring.load(Path(keys_file)).local_key
        http, admin = (f"http://{listening[name]}" for name in ("http", "admin"))
        with contextlib.ExitStack() as clients:
            yield Edge(process, http, admin, key, clients, listening.get("grpc", ""), keys_file)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[str, str]]:
    with (
        running("bench.fake_worker", "--step-ms", "5") as context,
        running("bench.fake_worker", "--step-ms", "5") as generation,
    ):
        yield heard(context)["grpc"], heard(generation)["grpc"]


@pytest.fixture
def edge(tmp_path: Path, workers: tuple[str, str]) -> Iterator[Edge]:
    context, generation = workers
    with edge_of(tmp_path, [context], [generation]) as started:
        assert heard(started.process) == {"event": "ready"}
        yield started


def expected(prompt: str, tokens: int) -> str:
    packed = array("I", list(prompt.encode())).tobytes()
    return "".join(chr(answer_token(packed, number)) for number in range(tokens))


def test_an_answer_is_handed_from_one_worker_to_the_other_and_is_whole(edge: Edge, workers: tuple[str, str]) -> None:
    answer = edge.openai().completions.with_raw_response.create(model="tiny", prompt="Hi", max_tokens=30)

    assert answer.parse().choices[0].text == expected("Hi", 30)
    receipt = json.loads(answer.headers["x-kinroute-receipt"])
    assert (receipt["context_worker"], receipt["generation_worker"]) == workers
    stream = edge.openai().completions.create(model="tiny", prompt="Hi", max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected("Hi", 30)


def test_a_caller_that_hangs_up_leaves_nothing_anywhere(edge: Edge, workers: tuple[str, str]) -> None:
    client = edge.openai()
    stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=5_000, stream=True)
    next(iter(stream))
    stream.close()

    assert edge.settled_leaks() == {"requests": 0, "turns": 0, "legs": 0}


def test_a_running_answer_is_finished_before_the_edge_ends(edge: Edge) -> None:
    stream = edge.openai().completions.create(model="tiny", prompt="Hi", max_tokens=100, stream=True)
    chunks = iter(stream)
    first = next(chunks).choices[0].text
    edge.process.send_signal(signal.SIGTERM)

    assert first + "".join(chunk.choices[0].text for chunk in chunks) == expected("Hi", 100)
    assert edge.process.wait(DEADLINE_S) == 0


def test_an_answer_that_outlasts_the_drain_is_cut_off(tmp_path: Path, workers: tuple[str, str]) -> None:
    with edge_of(tmp_path, [workers[0]], [workers[1]], drain_timeout_s=1) as edge:
        heard(edge.process)
        stream = edge.openai().completions.create(model="tiny", prompt="Hi", max_tokens=50_000, stream=True)
        chunks = iter(stream)
        next(chunks)
        edge.process.send_signal(signal.SIGTERM)

        with pytest.raises((httpx.HTTPError, openai.APIError)):
            list(chunks)
        assert edge.process.wait(DEADLINE_S) == 0


def test_an_edge_is_ready_only_once_it_has_its_workers(tmp_path: Path, workers: tuple[str, str]) -> None:
    with edge_of(tmp_path, [workers[0]], ["127.0.0.1:9"]) as edge:
        assert httpx.get(f"{edge.url}/live").status_code == 200
        assert httpx.get(f"{edge.url}/ready").status_code == 503


def test_a_token_signed_with_the_shared_secret_is_a_key(tmp_path: Path, workers: tuple[str, str]) -> None:
    (tmp_path / "secret").write_text(SECRET)
    auth = {"jwt": {"secret_file": str(tmp_path / "secret"), "audience": "kinroute"}}
    with edge_of(tmp_path, [workers[0]], [workers[1]], auth=auth) as edge:
        heard(edge.process)
        claims = {"sub": "ann", "tenant": "acme", "aud": "kinroute", "exp": time.time() + 60}
        edge.key = jwt.encode(claims, SECRET, "HS256")
        assert edge.openai().completions.create(model="tiny", prompt="Hi", max_tokens=2).choices[0].text
        edge.key = jwt.encode({**claims, "aud": "other"}, SECRET, "HS256")
        with pytest.raises(openai.AuthenticationError):
            edge.openai().models.list()


def test_anonymous_callers_are_served_where_the_configuration_says_so(tmp_path: Path, workers: tuple[str, str]) -> None:
    listen = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0", "allow_anonymous": True}
    with edge_of(tmp_path, [workers[0]], [workers[1]], listen=listen, keys_file=None) as edge:
        heard(edge.process)
        response = httpx.post(f"{edge.url}/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 3})
        assert response.json()["choices"][0]["text"] == expected("Hi", 3)
        with_key = httpx.get(f"{edge.url}/v1/models", headers={"authorization": "Bearer wrong"})
        assert with_key.status_code == 401, "a wrong key is still wrong"


@pytest.mark.parametrize(("host", "with_parent"), [("127.0.0.1", 200), ("0.0.0.0", 403)])  # noqa: S104 - tested here
def test_anonymous_callers_may_name_a_parent_on_loopback_alone(
    tmp_path: Path, workers: tuple[str, str], host: str, with_parent: int
) -> None:
    address = f"{host}:0"
    listen = {
        "http": address,
        "admin": {"address": address, "allow_plaintext": True},
        "allow_anonymous": True,
        "allow_plaintext": True,
    }
    with edge_of(tmp_path, [workers[0]], [workers[1]], listen=listen, keys_file=None) as edge:
        heard(edge.process)
        url, admin = (one.replace("0.0.0.0", "127.0.0.1") for one in (edge.url, edge.admin))  # noqa: S104 - as above
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3}
        child = {"x-kinroute-conversation-id": "child", "x-kinroute-parent-id": "parent"}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=body, headers=child).status_code == with_parent
        assert httpx.get(f"{admin}/metrics").status_code == 200
        control = httpx.get(f"{admin}/kinroute/v1/requests").status_code
        edge.process.terminate()
        logs = edge.process.communicate(timeout=DEADLINE_S)[1]

    warned = ["listen.http is", "listen.admin is", "listen.allow_anonymous is true"]
    if host == "127.0.0.1":
        assert (control, [words in logs for words in warned]) == (200, [False] * 3)
    else:
        assert (control, [words in logs for words in warned]) == (403, [True] * 3)


def test_callers_are_served_over_tls(tmp_path: Path, workers: tuple[str, str]) -> None:
    authority = Authority(tmp_path)
    addresses = dict.fromkeys(("http", "grpc", "admin"), "127.0.0.1:0")
    listen = {**addresses, "tls": authority.issue("edge").files}
    with edge_of(tmp_path, [workers[0]], [workers[1]], listen=listen) as edge:
        heard(edge.process)
        context = ssl.create_default_context(cafile=authority.file)
        with httpx.Client(verify=context, headers={"authorization": f"Bearer {edge.key}"}) as client:
            url = edge.url.replace("http:", "https:")
            response = client.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 3})
        assert response.json()["choices"][0]["text"] == expected("Hi", 3)
        trusted = grpc.ssl_channel_credentials(Path(authority.file).read_bytes())
        with grpc.secure_channel(edge.grpc, trusted) as channel:
            info = service_pb2_grpc.ControlStub(channel).GetServerInfo(
                server_pb2.GetServerInfoRequest(), metadata=(("x-api-key", edge.key),), timeout=DEADLINE_S
            )
        assert info.engine_name
        with grpc.insecure_channel(edge.grpc) as channel, pytest.raises(grpc.RpcError):
            service_pb2_grpc.ControlStub(channel).GetServerInfo(
                server_pb2.GetServerInfoRequest(), metadata=(("x-api-key", edge.key),), timeout=DEADLINE_S
            )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"keys_file": "/nothing/keys.json"}, "There is no key file /nothing/keys.json"),
        ({"model": {"name": "tiny", "path": "/nothing"}}, "/nothing is not a folder"),
        (
            {
                "listen": {
                    "http": "127.0.0.1:0",
                    "admin": "127.0.0.1:0",
                    "tls": {"certificate_file": "/c", "key_file": "/k"},
                }
            },
            "listen.tls.certificate_file is '/c': it cannot be read",
        ),
        ({"listen": {"http": "192.0.2.1:1", "allow_plaintext": True}}, "listen.http is '192.0.2.1:1': cannot listen"),
    ],
)
def test_what_keeps_it_from_starting_is_one_sentence(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    file = configure(tmp_path, ["127.0.0.1:9"], ["127.0.0.1:9"], **more)

    with running("kinroute", "edge", "--config", str(file)) as process:
        output, errors = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 78
    assert said in errors
    assert "Traceback" not in errors
    assert output == ""


def test_where_tokens_must_prove_it_does_not_start_without_keys_to_sign_them(tmp_path: Path) -> None:
    file = configure(tmp_path, ["127.0.0.1:9"], ["127.0.0.1:9"], affinity={"proof": "token"})
    keys = json.loads((tmp_path / "keys.json").read_text())
    (tmp_path / "keys.json").write_text(json.dumps(keys | {"lineage_keys": []}))

    with running("kinroute", "edge", "--config", str(file)) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 78
    assert "run kinroute keys rotate" in errors
