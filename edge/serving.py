"""A uvicorn server on a socket that is already bound, which leaves signals to the process that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn

from configuration.addresses import split_address
from configuration.reading import SettingsError
from configuration.tls import Kept, ServerMaterial, renewing_context
from edge.http.asgi import App
from edge.http.protocol import Guards, protocol_with
from edge.settings import Limits

BACKLOG = 2048


def bind(address: str, key: str) -> socket.socket:
    """A listening socket. Raises SettingsError naming the key."""
    host, port = split_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(target)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingsError(f"{key} is {address!r}: cannot listen there ({error.strerror}).") from error
    listener.setblocking(False)
    return listener


def bound_address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server(uvicorn.Server):
    """Serves `app` until `should_exit` is set, then lets answers go on for `drain_s` at most.

    `certificate_optional`: callers that present none are served too, without CERTIFIED in their scope's extensions.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        *,
        drain_s: float,
        tls: Kept[ServerMaterial] | None = None,
        certificate_optional: bool = False,
    ) -> None:
        guards = Guards(
            limits.connections,
            limits.header_bytes,
            limits.header_timeout_s,
            limits.body_timeout_s,
            limits.body_bytes_per_s,
            limits.stalled_client_timeout_s,
        )
        config = uvicorn.Config(
            cast("Any", app),
            http=protocol_with(guards),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.keep_alive_timeout_s),
            timeout_graceful_shutdown=int(drain_s),
        )
        config.load()
        if tls is not None:
            config.ssl = renewing_context(tls, certificate_optional=certificate_optional)
        super().__init__(config)
        self._handshake_s = limits.header_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, but a TLS handshake gets the time that headers get; it leaves it a minute."""
        await super().startup([])
        config = self.config
        for listener in sockets or []:
            server = await asyncio.get_running_loop().create_server(
                self._protocol,
                sock=listener,
                ssl=config.ssl,
                ssl_handshake_timeout=None if config.ssl is None else self._handshake_s,
                backlog=config.backlog,
            )
            self.servers.append(server)

    def _protocol(self) -> asyncio.Protocol:
        protocol = cast("Any", self.config.http_protocol_class)
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
