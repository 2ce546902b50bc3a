"""How the edge's gRPC channels to workers are kept: options, patience, and when to try again."""

from __future__ import annotations

import random

import grpc

from configuration.tls import ClientMaterial, Kept

MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    # Edges and workers of one process tree would otherwise share a connection, and die together.
    ("grpc.use_local_subchannel_pool", 1),
)
CONNECT_DEADLINE_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


class Channels:
    """Opens channels: over TLS where there are certificates, with what they are now."""

    def __init__(self, tls: Kept[ClientMaterial] | None = None) -> None:
        self._tls = tls

    @property
    def material(self) -> ClientMaterial | None:
        """Another one once certificates have changed: a channel keeps those with which it was opened."""
        return None if self._tls is None else self._tls.current

    def open(self, address: str) -> grpc.aio.Channel:
        tls = self.material
        if tls is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        options = CHANNEL_OPTIONS
        if tls.server_name is not None:
            options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)


class Pauses:
    """Seconds to wait before each further try: twice as long each time, up to a bound, never two edges in step."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def reset(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def next_s(self) -> float:
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)
        return pause_s
