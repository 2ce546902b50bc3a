"""Which addresses a worker may dial for pages. Pure: names are not resolved, so they are never allowed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

LOOPBACK = ("127.0.0.0/8", "::1/128")


class AllowedNetworks:
    """`networks` in CIDR notation. Raises ValueError where one is not."""

    def __init__(self, networks: Iterable[str] = LOOPBACK) -> None:
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)

    def address(self, host: str) -> str | None:
        """`host` as the one spelling to dial; None where it is a name or lies outside of all networks.

        An IPv4 address in IPv6 clothes counts as what it is.
        """
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return None
        if isinstance(address, ipaddress.IPv6Address):
            if address.scope_id is not None:
                return None
            address = address.ipv4_mapped or address
        return str(address) if any(address in network for network in self._networks) else None
