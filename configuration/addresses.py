"""Addresses to listen on and to dial, as settings hold them: `host:port`, an IPv6 host in brackets."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator


def split_address(text: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises ValueError, saying what is allowed."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:8000 or [::1]:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine alone. A name other than localhost is not trusted to."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(text: str) -> str:
    split_address(text)
    return text


AddressText = Annotated[str, AfterValidator(_address)]
