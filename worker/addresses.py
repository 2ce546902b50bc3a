"""Addresses to listen on and to dial: `host:port`, IPv6 in brackets."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Self

from configuration.addresses import split_address


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, saying what an address looks like."""
        return cls(*split_address(text))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Reservation:
    """A TCP address that this process owns, on which another of ours listens.

    Bound without listening, and shared (SO_REUSEPORT), so that the address stays ours while its listener is replaced.
    Raises OSError if anybody else has it.
    """

    def __init__(self, wanted: Address) -> None:
        family, kind, proto, _, target = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            # Without SO_REUSEPORT, so that an address that others share is refused too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            port = probe.getsockname()[1]
        self._socket = socket.socket(family, kind, proto)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((target[0], port, *target[2:]))
        self.address = Address(wanted.host, port)

    def close(self) -> None:
        self._socket.close()


def shared_listener(address: Address) -> socket.socket:
    """A listening socket on an address that a Reservation holds."""
    family, kind, proto, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(target)
    listener.listen(128)
    return listener
