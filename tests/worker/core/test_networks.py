from __future__ import annotations

import pytest

from worker.core.networks import AllowedNetworks


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.9.8.7", "127.9.8.7"),
        ("::1", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_loopback_is_allowed_by_default_under_one_spelling(host: str, address: str) -> None:
    assert AllowedNetworks().address(host) == address


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "169.254.169.254",
        "::ffff:10.0.0.1",
        "0.0.0.0",  # noqa: S104 - dialled, not bound
        "::",
        "localhost",
        "127.1",
        "0x7f000001",
        "2130706433",
        "127.0.0.1 ",
        "127.0.0.1%lo",
        "::1%lo",
        "",
        "example.com",
    ],
)
def test_other_addresses_and_every_name_are_not(host: str) -> None:
    assert AllowedNetworks().address(host) is None


def test_configured_networks_replace_the_default() -> None:
    networks = AllowedNetworks(["10.1.0.0/16", "fd00::/8"])

    assert networks.address("10.1.2.3") == "10.1.2.3"
    assert networks.address("fd00::5") == "fd00::5"
    assert networks.address("10.2.0.1") is None
    assert networks.address("127.0.0.1") is None


def test_no_network_allows_nothing() -> None:
    assert AllowedNetworks([]).address("127.0.0.1") is None
