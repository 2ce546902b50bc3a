"""The listeners of rank 0: gRPC, and the admin surface."""

from __future__ import annotations

import asyncio

import grpc

from configuration.grpc_tls import server_credentials
from configuration.tls import Watch, server_material
from enginelink.standard_services import add_standard_services
from enginelink.v1 import link_pb2_grpc
from openengine.v1 import service_pb2_grpc
from worker.addresses import Address, shared_listener
from worker.admin import Admin, AdminServer
from worker.grpc_api import InferenceService
from worker.grpc_control import ControlService
from worker.link import LinkService
from worker.metadata import ControlMetadata
from worker.service import Service
from worker.settings import Listen
from worker.unreadable import UnreadableMessages

MAX_MESSAGE_BYTES = 64 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 1),
    # What is compressed may unpack a thousandfold, after its size was measured.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
)
GRACE_S = 0.5
SERVICES = ("openengine.v1.Inference", "openengine.v1.Control", "enginelink.v1.EngineLink")


class Servers:
    """Serve `service` from `start` to `stop`. Raises SettingsError where a certificate cannot be used."""

    def __init__(self, service: Service, listen: Listen) -> None:
        self._listen = listen
        self._service = service
        self._grpc = grpc.aio.server(options=OPTIONS, interceptors=(UnreadableMessages(), ControlMetadata()))
        service_pb2_grpc.add_InferenceServicer_to_server(InferenceService(service), self._grpc)
        service_pb2_grpc.add_ControlServicer_to_server(ControlService(service), self._grpc)
        link_pb2_grpc.add_EngineLinkServicer_to_server(LinkService(service), self._grpc)
        self._health = add_standard_services(self._grpc, SERVICES)
        self._health_task: asyncio.Task[None] | None = None
        admin = listen.admin
        self._tls = None if listen.tls is None else server_material(listen.tls, "listen.tls")
        admin_tls = None if admin.tls is None else server_material(admin.tls, "listen.admin.tls")
        self._admin = AdminServer(Admin(service, certified_only=not admin.listener.is_loopback), admin_tls)
        self._watch = Watch([one for one in (self._tls, admin_tls) if one is not None])
        self._admin_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError or RuntimeError where an address cannot be had."""
        if self._tls is None:
            port = self._grpc.add_insecure_port(self._listen.grpc)
        else:
            port = self._grpc.add_secure_port(self._listen.grpc, server_credentials(self._tls))
        if not port:
            raise OSError(f"listen.grpc {self._listen.grpc} cannot be bound")
        await self._grpc.start()
        self._health_task = asyncio.create_task(self._health.follow(self._service.is_ready), name="health")
        listener = shared_listener(Address.parse(self._listen.admin.address))
        self._admin_task = asyncio.create_task(self._admin.run_on(listener), name="admin")

    async def stop(self) -> None:
        if self._health_task is not None:
            self._health_task.cancel()
        await self._grpc.stop(GRACE_S)
        self._admin.should_exit = True
        if self._admin_task is not None:
            await asyncio.wait([self._admin_task], timeout=GRACE_S)
            self._admin_task.cancel()
        self._watch.close()
