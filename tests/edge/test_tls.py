"""The edge's HTTP listeners over TLS: who gets in, and what happens as certificates change."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from cryptography import x509

from bench.certificates import Authority
from configuration.tls import Kept, ServerMaterial, ServerTls, server_material
from edge.core.types import FinishReason
from edge.settings import Limits
from tests.edge.http.harness import KEY, MODEL, OPERATOR_KEY, Script, Served, make_text_folder, served

ASKED = {"model": MODEL, "prompt": "Hi", "max_tokens": 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "own")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "stranger")


@pytest.fixture
def kept(authority: Authority) -> Kept[ServerMaterial]:
    """The listener's certificates, which ask for callers'."""
    files = {**authority.issue("edge").files, "client_ca_file": authority.file}
    return server_material(ServerTls.model_validate(files), "listen.tls")


@pytest.fixture
def edge(text: Path, kept: Kept[ServerMaterial]) -> Iterator[Served]:
    with served(text, tls=kept, limits=Limits(stream_comment_s=0.05)) as running:
        yield running


def trust(authority_file: str, own: tuple[str, str] | None = None) -> ssl.SSLContext:
    """A client's, which shows its `own` certificate where it has one."""
    context = ssl.create_default_context(cafile=authority_file)
    if own is not None:
        context.load_cert_chain(*own)
    return context


def client(authority: Authority, own: tuple[str, str] | None = None, key: str = KEY) -> httpx.Client:
    context = trust(authority.file, own)
    return httpx.Client(verify=context, headers={"authorization": f"Bearer {key}"}, timeout=20.0)


def replaced(kept: Kept[ServerMaterial]) -> None:
    """The files have been seen to have changed."""
    kept.look()
    kept.look()


def serial_of(address: tuple[str, int], own: tuple[str, str]) -> int:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(*own)
    with socket.create_connection(address) as plain, context.wrap_socket(plain) as secured:
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_a_caller_with_a_certificate_and_a_key_is_served(edge: Served, authority: Authority) -> None:
    http = openai.DefaultHttpxClient(verify=trust(authority.file, authority.issue("ann").pair))
    with openai.OpenAI(base_url=f"{edge.url}/v1", api_key=KEY, http_client=http, max_retries=0) as ann:
        answer = ann.completions.create(model=MODEL, prompt="Hi", max_tokens=8)

    assert answer.choices[0].text == "Hello!"


def test_a_certificate_stands_in_for_no_key(edge: Served, authority: Authority) -> None:
    with client(authority, authority.issue("ann").pair, key="wrong") as http:
        assert http.post(f"{edge.url}/v1/completions", json=ASKED).status_code == 401


def test_who_shows_no_certificate_or_a_strangers_is_refused(
    edge: Served, authority: Authority, stranger: Authority
) -> None:
    for own in (None, stranger.issue("eve").pair):
        with client(authority, own) as http, pytest.raises(httpx.TransportError):
            http.post(f"{edge.url}/v1/completions", json=ASKED)
    assert edge.worker.orders == []


def test_an_edge_whose_authority_the_caller_does_not_know_is_not_spoken_to(
    edge: Served, authority: Authority, stranger: Authority
) -> None:
    with client(stranger, authority.issue("ann").pair) as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        http.post(f"{edge.url}/v1/completions", json=ASKED)


def test_a_caller_without_tls_is_cut_off_and_others_are_served(edge: Served, authority: Authority) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(edge.url.replace("https:", "http:") + "/v1/completions", json=ASKED, timeout=10.0)

    with client(authority, authority.issue("ann").pair) as http:
        assert http.get(f"{edge.url}/v1/models").status_code == 200


def test_who_begins_no_handshake_is_cut_off(text: Path, kept: Kept[ServerMaterial]) -> None:
    with (
        served(text, tls=kept, limits=Limits(header_timeout_s=0.2)) as edge,
        socket.create_connection(edge.address, timeout=20.0) as silent,
    ):
        assert silent.recv(1) == b""


def test_old_versions_of_tls_are_refused(edge: Served, authority: Authority) -> None:
    context = trust(authority.file, authority.issue("ann").pair)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(edge.address) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as it:
        assert it.version() == "TLSv1.2"

    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1 "):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(edge.address) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_new_certificates_serve_new_connections_while_an_answer_streams_on(
    edge: Served, authority: Authority, kept: Kept[ServerMaterial]
) -> None:
    ann = authority.issue("ann").pair
    rest = threading.Event()
    edge.worker.answer = lambda order: Script("Hello!", FinishReason.STOP, hold=rest)
    before = serial_of(edge.address, ann)
    with client(authority, ann) as http:
        streamed = {**ASKED, "stream": True}
        with http.stream("POST", f"{edge.url}/v1/completions", json=streamed) as answer:
            renewed = authority.issue("edge")
            replaced(kept)
            assert serial_of(edge.address, ann) == renewed.serial != before
            rest.set()
            assert answer.read().endswith(b"data: [DONE]\n\n")


def test_an_authority_that_is_replaced_lets_nobody_in_any_more(
    edge: Served, authority: Authority, stranger: Authority, kept: Kept[ServerMaterial]
) -> None:
    known = client(authority, authority.issue("ann").pair), client(authority, stranger.issue("bob").pair)
    with known[0] as ann, known[1] as bob:
        assert ann.get(f"{edge.url}/v1/models", headers={"connection": "close"}).status_code == 200
        with pytest.raises(httpx.TransportError):
            bob.get(f"{edge.url}/v1/models")

        Path(authority.file).write_bytes(Path(stranger.file).read_bytes())
        replaced(kept)

        with pytest.raises(httpx.TransportError):
            ann.get(f"{edge.url}/v1/models")
        assert bob.get(f"{edge.url}/v1/models").status_code == 200


CONTROL = "/kinroute/v1/workers"
PROBES = ("/live", "/ready", "/health", "/metrics")


def test_off_loopback_the_admin_listener_asks_for_the_scope_operator_but_for_probes_and_metrics(text: Path) -> None:
    with served(text, admin_guarded=True) as edge:
        for path in PROBES:
            assert edge.admin(path).status_code == 200
        for key, status in (("", 401), ("wrong", 401), (KEY, 403), (OPERATOR_KEY, 200)):
            headers = {"x-api-key": key} if key else {}
            assert httpx.get(edge.admin_url + CONTROL, headers=headers, timeout=20.0).status_code == status
        refused = edge.admin("/metrics").text
        assert 'kinroute_edge_refused_total{reason="no scope operator",what="control"} 1.0' in refused


def test_over_tls_a_certificate_makes_an_operator_and_probes_need_none(
    text: Path, authority: Authority, stranger: Authority, kept: Kept[ServerMaterial]
) -> None:
    with served(text, admin_guarded=True, admin_tls=kept) as edge:
        with client(authority, key="wrong") as http:
            assert [http.get(edge.admin_url + path).status_code for path in (*PROBES, CONTROL)] == [200] * 4 + [401]
        with client(authority, authority.issue("ops").pair, key="wrong") as http:
            assert http.get(edge.admin_url + CONTROL).status_code == 200
        with client(authority, stranger.issue("eve").pair) as http, pytest.raises(httpx.TransportError):
            http.get(edge.admin_url + "/live")
