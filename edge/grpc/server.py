"""The edge's gRPC listener: OpenEngine, the standard health service, reflection."""

from __future__ import annotations

import asyncio

import grpc

from configuration.addresses import split_address
from configuration.reading import SettingsError
from edge.core.seals import Seals
from edge.driver import Driver
from edge.grpc.control import Control
from edge.grpc.door import Door
from edge.grpc.inference import Inference
from edge.grpc.kv_events import Dial, KvEvents
from edge.grpc.requests import Requests
from edge.grpc.signed_hints import SignedHints
from edge.http.route import Parts
from edge.settings import Limits
from enginelink.standard_services import Health, add_standard_services
from openengine.v1 import service_pb2

MAX_STREAMS = 1_024
"""On one connection; a caller's library opens the next when one ends."""
SERVICES = ("openengine.v1.Inference", "openengine.v1.Control")


def make_server(limits: Limits) -> grpc.aio.Server:
    """To be made on the loop that serves it."""
    return grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", limits.body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.absolute_max_metadata_size", limits.header_bytes),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.server_handshake_timeout_ms", round(limits.header_timeout_s * 1000)),
            ("grpc.so_reuseport", 0),
            # What is compressed may unpack a thousandfold, after its size was measured.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.per_message_decompression", 0),
        )
    )


class GrpcServer:
    """Serves from `start` to `stop`. `address` is known after `start`. `dial`: a channel of its own to a worker."""

    def __init__(
        self,
        parts: Parts,
        seals: Seals,
        dial: Dial,
        *,
        instance_id: str,
        version: str,
        signed_hints: SignedHints | None = None,
    ) -> None:
        self._driver: Driver = parts.driver
        self._server = make_server(parts.limits)
        door, requests = Door(parts.identities, parts.admission, parts.limits), Requests()
        signed_hints = signed_hints or SignedHints({})
        inference = Inference(parts, door, seals, requests, signed_hints)
        self._kv_events = kv_events = KvEvents(
            parts.driver.fleet, dial, unread_deadline_s=parts.limits.stalled_client_timeout_s
        )
        control = Control(
            parts,
            seals,
            requests,
            kv_events,
            instance_id=instance_id,
            version=version,
            takes_signed_hints=signed_hints.is_taken,
        )
        services = service_pb2.DESCRIPTOR.services_by_name
        self._server.add_generic_rpc_handlers(
            (
                door.handler(services["Inference"], {"Generate": inference.generate}),
                door.handler(services["Control"], control.methods),
            )
        )
        self._health: Health = add_standard_services(self._server, SERVICES)
        self._following: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> None:
        """Without `credentials` it speaks plaintext. Raises SettingsError where the address cannot be had."""
        host, _ = split_address(address)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise SettingsError(f"listen.grpc is {address!r}: cannot listen there ({error}).") from error
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await self._server.start()
        self._following = asyncio.create_task(self._health.follow(lambda: self._driver.model_ready), name="health")

    async def stop(self, drain_s: float) -> None:
        """No new call is taken; those that run may go on for `drain_s`."""
        if self._following is not None:
            self._following.cancel()
        self._kv_events.close()
        await self._server.stop(drain_s)
