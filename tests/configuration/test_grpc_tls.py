"""gRPC servers whose certificates change while they run."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.certificates import Authority
from configuration.grpc_tls import server_credentials
from configuration.tls import (
    ClientTls,
    Kept,
    ServerMaterial,
    ServerTls,
    client_material,
    server_material,
)
from edge.channels import Channels
from enginelink.standard_services import add_standard_services

pytestmark = pytest.mark.anyio
DEADLINE_S = 10.0


@dataclass
class Listening:
    address: str
    authority: Authority
    kept: Kept[ServerMaterial]

    def channels(self, **files: str) -> Channels:
        given = {"ca_file": self.authority.file, **files}
        return Channels(client_material(ClientTls.model_validate(given), "worker_tls"))


@pytest.fixture
async def listening(tmp_path: Path) -> AsyncIterator[Listening]:
    """It asks for certificates, and has one for the name `workers`."""
    authority = Authority(tmp_path / "own")
    files = {**authority.issue("worker", "workers").files, "client_ca_file": authority.file}
    kept = server_material(ServerTls.model_validate(files), "listen.tls")
    server = grpc.aio.server()
    add_standard_services(server, ())
    port = server.add_secure_port("127.0.0.1:0", server_credentials(kept))
    await server.start()
    yield Listening(f"127.0.0.1:{port}", authority, kept)
    await server.stop(0.0)


async def code_of(channels: Channels, address: str) -> grpc.StatusCode:
    async with channels.open(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_both_sides_check_each_other(listening: Listening, tmp_path: Path) -> None:
    own, stranger = listening.authority.issue("edge").files, Authority(tmp_path / "stranger")
    named = {"server_name": "workers"}

    for channels, code in (
        (listening.channels(**own, **named), grpc.StatusCode.OK),
        (listening.channels(**named), grpc.StatusCode.UNAVAILABLE),
        (listening.channels(**own), grpc.StatusCode.UNAVAILABLE),
        (listening.channels(**stranger.issue("eve").files, **named), grpc.StatusCode.UNAVAILABLE),
        (listening.channels(**own, **named, ca_file=stranger.file), grpc.StatusCode.UNAVAILABLE),
        (Channels(), grpc.StatusCode.UNAVAILABLE),
    ):
        assert await code_of(channels, listening.address) is code


async def test_new_connections_get_new_certificates_and_old_ones_live_on(listening: Listening) -> None:
    own = listening.authority.issue("edge")
    channels = listening.channels(**own.files, server_name="workers")
    async with channels.open(listening.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        renewed = listening.authority.issue("worker", "workers")
        listening.kept.look()
        listening.kept.look()

        assert _serial_of(listening.address, own.pair) == renewed.serial
        await check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)


async def test_a_channel_shows_what_its_files_hold_when_it_is_opened(listening: Listening, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger")
    wrong = stranger.issue("edge")
    tls = ClientTls.model_validate({"ca_file": listening.authority.file, **wrong.files, "server_name": "workers"})
    kept = client_material(tls, "worker_tls")
    channels = Channels(kept)
    assert await code_of(channels, listening.address) is grpc.StatusCode.UNAVAILABLE

    right = listening.authority.issue("edge")
    for old, new in zip(wrong.pair, right.pair, strict=True):
        shutil.copyfile(new, old)
    kept.look()
    kept.look()
    assert await code_of(channels, listening.address) is grpc.StatusCode.OK


def _serial_of(address: str, own: tuple[str, str]) -> int:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(*own)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as secured:
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number
