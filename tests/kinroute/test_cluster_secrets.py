"""`kinroute keys init-secrets`: a release's keys are made once, whatever is there already, and whoever is faster."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from bench.certificates import Authority
from edge.keyring import Keyring, digest_of
from kinroute.cluster_secrets import NAMES, Cluster, init_secrets
from kinroute.problem import Problem


class Secrets(BaseHTTPRequestHandler):
    """Kubernetes' API, as far as Secrets of the namespace `agents` go."""

    kept: ClassVar[dict[str, dict[str, Any]]]
    callers: ClassVar[set[str]]
    rival: ClassVar[dict[str, Any] | None]
    """Makes the Secret `PREFIX-keys` when it was just looked for."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/v1/namespaces/agents/secrets/")
        found = self.kept.get(name)
        self._answer(404 if found is None else 200, found or {"message": "not found"})
        if self.rival is not None and self.rival["metadata"]["name"] == name:
            self.kept[name] = self.rival

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = made["metadata"]["name"]
        if name.endswith("-forbidden"):
            self._answer(403, {"message": "secrets is forbidden"})
        elif name in self.kept:
            self._answer(409, {"message": "already exists"})
        else:
            self.kept[name] = made
            self._answer(201, made)

    def _answer(self, status: int, body: object) -> None:
        self.callers.add(self.headers["Authorization"] or "")
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing: the test looks at what is kept."""


class Api:
    def __init__(self) -> None:
        class Handler(Secrets):
            kept: ClassVar[dict[str, dict[str, Any]]] = {}
            callers: ClassVar[set[str]] = set()
            rival = None

        self.handler: type[Secrets] = Handler
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self.server.server_address[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}")

    @property
    def kept(self) -> dict[str, dict[str, Any]]:
        return self.handler.kept

    def held(self, name: str, member: str) -> bytes:
        return base64.b64decode(self.kept[name]["data"][member])

    def cluster(self) -> Cluster:
        return Cluster(self.client, "agents", {"release": "r"})


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    thread = threading.Thread(target=api.server.serve_forever, args=(0.01,))
    thread.start()
    yield api
    api.client.close()
    api.server.shutdown()
    api.server.server_close()
    thread.join()


def keyring(api: Api, folder: Path) -> Keyring:
    file = folder / "keys.json"
    file.touch(mode=0o600)
    file.write_bytes(api.held("r-keys", "keys.json"))
    return Keyring.load(file)


def test_edges_workers_and_the_first_caller_get_keys_that_fit_each_other(api: Api, tmp_path: Path) -> None:
    init_secrets(api.cluster(), "r")

    assert set(api.kept) == {f"r-{name}" for name in NAMES}
    keys = keyring(api, tmp_path)
    caller = keys.principals[digest_of(api.held("r-api-key", "api-key").decode())]
    assert (caller.tenant, caller.subject, set(caller.scopes)) == ("default", "first", {"affinity"})
    [envelope] = json.loads(api.held("r-worker-keys", "worker-keys.json"))["envelope_keys"]
    assert envelope["id"] == keys.content.envelope_keys[0].id
    assert set(json.loads(api.held("r-worker-keys", "worker-keys.json"))) == {"envelope_keys"}
    assert len(api.held("r-group-token", "token")) == 64
    assert api.kept["r-keys"]["metadata"]["labels"] == {"release": "r"}


def test_what_is_there_is_left_alone(api: Api) -> None:
    init_secrets(api.cluster(), "r")
    before = json.dumps(api.kept, sort_keys=True)

    init_secrets(api.cluster(), "r")

    assert json.dumps(api.kept, sort_keys=True) == before


@pytest.mark.parametrize("missing", NAMES)
def test_an_installation_that_was_interrupted_goes_on_with_the_keys_it_has(
    api: Api, tmp_path: Path, missing: str
) -> None:
    init_secrets(api.cluster(), "r")
    first = {name: content for name, content in api.kept.items() if name != f"r-{missing}"}
    del api.kept[f"r-{missing}"]

    init_secrets(api.cluster(), "r")

    assert {name: content for name, content in api.kept.items() if name != f"r-{missing}"} == first
    worker = json.loads(api.held("r-worker-keys", "worker-keys.json"))
    keys = keyring(api, tmp_path)
    if missing == "keys":
        assert digest_of(api.held("r-api-key", "api-key").decode()) in keys.principals
    else:
        assert worker["envelope_keys"][0]["id"] == keys.content.envelope_keys[0].id


def test_of_two_that_install_at_once_the_faster_ones_keys_count_for_both(api: Api, tmp_path: Path) -> None:
    init_secrets(api.cluster(), "r")
    rival = api.kept["r-keys"]
    api.kept.clear()
    api.handler.rival = rival

    init_secrets(api.cluster(), "r")

    assert api.kept["r-keys"] is rival
    worker = json.loads(api.held("r-worker-keys", "worker-keys.json"))
    assert worker["envelope_keys"][0]["id"] == keyring(api, tmp_path).content.envelope_keys[0].id


def test_what_the_cluster_refuses_is_said_in_its_words(api: Api) -> None:
    with pytest.raises(Problem, match=r"x-forbidden cannot be made: 403 secrets is forbidden"):
        api.cluster().keep("x-forbidden", "a", lambda: b"")


def test_a_secret_of_another_form_is_named(api: Api) -> None:
    api.kept["r-keys"] = {"data": {"other": ""}}

    with pytest.raises(Problem, match=r"r-keys holds no keys.json"):
        init_secrets(api.cluster(), "r")


def test_it_speaks_as_the_service_account_of_its_pod_and_to_that_clusters_server_alone(
    api: Api, tmp_path: Path
) -> None:
    own, other = Authority(tmp_path / "own"), Authority(tmp_path / "other")
    issued = own.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate_file, issued.key_file)
    api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT_HTTPS": str(api.port)}
    for name, content in (("token", "of-the-pod\n"), ("namespace", "agents"), ("ca.crt", Path(own.file).read_text())):
        (tmp_path / name).write_text(content)

    trusted = Cluster.of_pod(environment, tmp_path, {})
    with trusted.client:
        init_secrets(trusted, "r")
    (tmp_path / "ca.crt").write_text(Path(other.file).read_text())
    deceived = Cluster.of_pod(environment, tmp_path, {})
    with deceived.client, pytest.raises(Problem, match=r"does not answer"):
        init_secrets(deceived, "r")

    assert api.handler.callers == {"Bearer of-the-pod"}


def test_outside_of_a_pod_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"no pod with a service account"):
        Cluster.of_pod({}, tmp_path, {})
