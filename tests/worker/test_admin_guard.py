"""Off loopback a worker's admin listener answers probes and metrics to all, the rest to callers with a certificate."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from bench.certificates import Authority
from configuration.tls import Kept, ServerMaterial, ServerTls, server_material
from tests.worker.test_admin_calls import Worker
from worker.addresses import Address, shared_listener
from worker.admin import Admin, AdminServer

PROBES = ("/live", "/health", "/ready", "/metrics")
CONTROL = "/kinroute/v1/leaks"

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def guarded(worker: Worker, tls: Kept[ServerMaterial] | None = None) -> AsyncIterator[str]:
    """Its address."""
    server = AdminServer(Admin(worker, certified_only=True), tls)
    with shared_listener(Address("127.0.0.1", 0)) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run_on(listener))
            yield f"127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True


def context_of(authority: Authority, own: tuple[str, str] | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if own is not None:
        context.load_cert_chain(*own)
    return context


async def test_in_the_clear_nobody_may_do_more_than_probe() -> None:
    worker = Worker()
    async with guarded(worker) as address, httpx.AsyncClient(base_url=f"http://{address}") as client:
        assert [(await client.get(path)).status_code for path in (*PROBES, CONTROL)] == [200] * 4 + [403]
        assert (await client.post("/kinroute/v1/cache/clear")).status_code == 403
    assert worker.asked == []


async def test_whoever_shows_a_certificate_may_control_and_probes_need_none(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "own"), Authority(tmp_path / "stranger")
    files = {**authority.issue("worker").files, "client_ca_file": authority.file}
    tls = server_material(ServerTls.model_validate(files), "listen.admin.tls")
    worker = Worker()
    async with guarded(worker, tls) as address:
        url = f"https://{address}"
        async with httpx.AsyncClient(base_url=url, verify=context_of(authority, None)) as client:
            assert [(await client.get(path)).status_code for path in (*PROBES, CONTROL)] == [200] * 4 + [403]
        assert worker.asked == []
        own = authority.issue("ops").pair
        async with httpx.AsyncClient(base_url=url, verify=context_of(authority, own)) as client:
            assert (await client.get(CONTROL)).status_code == 200
        assert worker.asked == [("leaks",)]
        own = stranger.issue("eve").pair
        async with httpx.AsyncClient(base_url=url, verify=context_of(authority, own)) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/live")
