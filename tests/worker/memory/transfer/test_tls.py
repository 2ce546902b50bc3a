"""Pages over TLS: both ends show certificates, and whatever else comes gets nothing and disturbs nobody."""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bench.certificates import Authority
from configuration.tls import ClientMaterial, ClientTls, Kept, client_material
from tests.worker.memory.transfer.samples import (
    HELD,
    HELD_TOKENS,
    Ending,
    empty_pool,
    filled_pool,
    layouts,
    make_ref,
    numbers,
)
from tests.worker.memory.transfer.source import Source
from worker.memory.transfer.client import PullResult, TransferClient

LAYOUT = layouts(3, 1)[0]
TARGETS = [9, 0, 1, 2, 23, 4, 5]
SESSIONS = itertools.count(1)


@dataclass(frozen=True)
class Certified:
    authority: Authority
    source: Source

    def material(self, **changes: str) -> Kept[ClientMaterial]:
        """Of a worker that they let in, with `changes`."""
        files = {"ca_file": self.authority.file, **self.authority.issue("generation").files, **changes}
        return client_material(ClientTls.model_validate(files), "kv_transfer.tls")

    def pull(self, tls: Kept[ClientMaterial] | None, *, shared: bool = False) -> tuple[PullResult, bool]:
        """How a pull ended, and whether all pages are those of the source."""
        return pull(self.source, tls, shared=shared)


def pull(source: Source, tls: Kept[ClientMaterial] | None, *, shared: bool = False) -> tuple[PullResult, bool]:
    session_id = f"{next(SESSIONS):032x}"
    source.pin(HELD, HELD_TOKENS, session_id)
    ref = make_ref(LAYOUT, source.ranks[:1], host_key=source.host_key if shared else "", session_id=session_id)
    pool = empty_pool(LAYOUT)
    pool.tensor.zero_()
    client = TransferClient(pool, LAYOUT, ("127.0.0.0/8",), 20.0, tls)
    ending = Ending()
    client.pull(ref, 0, np.array(TARGETS, np.int32), ending)
    result = ending.wait()
    client.close()
    source.unpin(session_id)
    came = bool((numbers(pool)[TARGETS] == numbers(filled_pool(LAYOUT))[HELD]).all())
    assert came or not numbers(pool).any(), "a pull that failed before its first byte wrote something"
    return result, came


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Certified]:
    authority = Authority(tmp_path_factory.mktemp("own"))
    tls = {**authority.issue("context", "127.0.0.1", "workers").files, "client_ca_file": authority.file}
    with Source([LAYOUT], tls=tls) as source:
        yield Certified(authority, source)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "stranger")


def test_pages_come_whole_over_tls(certified: Certified) -> None:
    result, came = certified.pull(certified.material())

    assert came
    assert (result.why, result.shared_bytes) == (None, 0)
    assert result.tcp_bytes > 0


def test_on_one_host_memory_is_shared_as_without_tls(certified: Certified) -> None:
    result, came = certified.pull(certified.material(), shared=True)

    assert came
    assert (result.why, result.tcp_bytes) == (None, 0)


def test_a_name_in_the_certificate_may_stand_for_the_address(certified: Certified) -> None:
    assert certified.pull(certified.material(server_name="workers"))[1]

    result, came = certified.pull(certified.material(server_name="edges"))
    assert not came
    assert "Hostname mismatch" in str(result.why)


def test_a_worker_without_a_certificate_or_with_a_strangers_pulls_nothing(
    certified: Certified, stranger: Authority
) -> None:
    bare = client_material(ClientTls.model_validate({"ca_file": certified.authority.file}), "kv_transfer.tls")
    for tls in (bare, certified.material(**stranger.issue("eve").files), None):
        result, came = certified.pull(tls)
        assert not came
        assert result.why is not None
    assert "only one end speaks TLS" in str(result.why)
    assert certified.pull(certified.material())[1]


def test_a_source_that_nobody_vouches_for_is_asked_for_nothing(certified: Certified, stranger: Authority) -> None:
    result, came = certified.pull(certified.material(ca_file=stranger.file))

    assert not came
    assert "CERTIFICATE_VERIFY_FAILED" in str(result.why)


def test_a_source_without_tls_is_not_spoken_to_in_the_clear(certified: Certified) -> None:
    with Source([LAYOUT]) as plain:
        assert pull(plain, None)[1]
        result, came = pull(plain, certified.material())

    assert not came
    assert "SSL" in str(result.why)


def test_whoever_stalls_or_breaks_off_a_handshake_keeps_nobody_out(certified: Certified) -> None:
    host, _, port = certified.source.addresses[0].rpartition(":")
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as half:
        hello = ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=certified.authority.file)
        speaking = context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            speaking.do_handshake()
        half.sendall(hello.read()[:40])
        for _ in range(20):
            # It speaks and is reset before it is let in, or after.
            gone = socket.create_connection((host, int(port)))
            gone.sendall(b"GET / HTTP/1.1\r\n\r\n")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()

        assert certified.pull(certified.material())[1]
        silent.settimeout(20.0)
        assert silent.recv(1) == b"", "who says nothing is shown the door"
