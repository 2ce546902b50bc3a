"""Workers dialled over TLS: an edge whose certificate they refuse is let in once it has another, without a restart."""

from __future__ import annotations

import asyncio
import gc
import shutil
from pathlib import Path

import grpc
import pytest

from bench.certificates import Authority
from bench.fake_engine import FakeEngine, Options
from bench.fake_openengine import FakeControl
from bench.fake_worker import FakeLink
from configuration.grpc_tls import server_credentials
from configuration.tls import ClientTls, ServerTls, client_material, server_material
from edge.channels import Channels
from edge.core.fleet import Fleet
from edge.core.types import WorkerId
from edge.hints import Hints
from edge.signing import EnvelopeSigner
from edge.worker_link import WorkerLink
from edge.worker_openengine import OpenEngineWorker
from enginelink.v1 import link_pb2_grpc
from openengine.v1 import service_pb2_grpc
from tests.edge.fakes import MODEL, until


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["enginelink", "openengine"])
async def test_an_edge_that_was_refused_is_let_in_once_its_certificate_is_replaced(
    tmp_path: Path, protocol: str
) -> None:
    authority, stranger = Authority(tmp_path / "own"), Authority(tmp_path / "stranger")
    files = {**authority.issue("worker").files, "client_ca_file": authority.file}
    engine = FakeEngine(Options())
    server = grpc.aio.server()
    service_pb2_grpc.add_ControlServicer_to_server(FakeControl(engine), server)
    link_pb2_grpc.add_EngineLinkServicer_to_server(FakeLink(engine), server)
    kept = server_material(ServerTls.model_validate(files), "listen.tls")
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', server_credentials(kept))}"
    await server.start()
    wrong = stranger.issue("edge")
    own = client_material(ClientTls.model_validate({"ca_file": authority.file, **wrong.files}), "worker_tls")
    fleet, worker_id = Fleet([address], [address]), WorkerId(address)
    hints, channels = Hints(EnvelopeSigner("edge-under-test", ())), Channels(own)
    if protocol == "enginelink":
        running = asyncio.create_task(WorkerLink(worker_id, "edge-under-test", fleet, hints, channels).run())
    else:
        running = asyncio.create_task(OpenEngineWorker(worker_id, MODEL, fleet, hints, channels).run())
    try:
        await asyncio.sleep(0.3)
        assert not fleet.workers[worker_id].ready

        for old, new in zip(wrong.pair, authority.issue("edge").pair, strict=True):
            shutil.copyfile(new, old)
        own.look()
        own.look()
        await until(lambda: fleet.workers[worker_id].ready)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0.0)
        # grpc's calls must be gone before their event loop is.
        gc.collect()
