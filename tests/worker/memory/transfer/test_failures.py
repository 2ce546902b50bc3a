"""Pulls that do not end well: each tells why, once, and leaves alone what it was given from then on."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.worker.memory.transfer.raw import RawClient, make_request, ok, raw_local_server, raw_server, read_request
from tests.worker.memory.transfer.samples import (
    HELD,
    HELD_TOKENS,
    NUM_PAGES,
    SECRET,
    SESSION_ID,
    WAIT_S,
    Ending,
    empty_pool,
    filled_pool,
    layouts,
    make_ref,
    numbers,
)
from tests.worker.memory.transfer.source import Source
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout
from worker.memory.transfer import pages, shared_memory
from worker.memory.transfer.client import Pull, PullResult, TransferClient
from worker.memory.transfer.connection import Connection
from worker.memory.transfer.server import TransferServer
from worker.memory.transfer.wire import Kind, Reply, Status

LOOPBACK = ("127.0.0.0/8",)
(LAYOUT,) = layouts(3, 1)
BIG = KvLayout(
    num_layers=8, num_kv_heads=4, head_dim=64, tokens_per_block=32, dtype="float32", head_start=0, head_stop=4
)
BIG_PAGES = np.arange(400, dtype=np.int32)
BIG_TOKENS = len(BIG_PAGES) * BIG.tokens_per_block
TARGETS = np.arange(len(HELD), dtype=np.int32)


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    pool = empty_pool(LAYOUT)
    yield pool
    pool.close()


@pytest.fixture
def client(pool: DevicePool) -> Iterator[TransferClient]:
    client = TransferClient(pool, LAYOUT, LOOPBACK, timeout_s=WAIT_S)
    yield client
    client.close()


def start(client: TransferClient, address: str) -> tuple[Pull, Ending]:
    ending = Ending()
    return client.pull(make_ref(LAYOUT, [(address, LAYOUT)]), 0, TARGETS, ending), ending


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.0005)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_source_that_is_killed_in_the_middle_fails_the_pull(shared: bool) -> None:
    pool = empty_pool(BIG, len(BIG_PAGES))
    client = TransferClient(pool, BIG, LOOPBACK, timeout_s=WAIT_S)
    with Source([BIG], num_pages=len(BIG_PAGES)) as source:
        source.pin(BIG_PAGES, BIG_TOKENS)
        ref = make_ref(BIG, source.ranks, host_key=source.host_key if shared else "", num_tokens=BIG_TOKENS)
        ending = Ending()
        pull = client.pull(ref, 0, BIG_PAGES, ending)
        until(lambda: pull.fetched.shared_bytes + pull.fetched.tcp_bytes > 0)
        os.kill(source.process.pid, signal.SIGSTOP)
        assert not ending.has_come
        os.kill(source.process.pid, signal.SIGKILL)

        result = ending.wait()

    assert result.why is not None
    assert "context rank 0" in result.why
    client.close()
    pool.close()


def test_a_source_that_is_stuck_fails_the_pull_at_its_deadline() -> None:
    client = TransferClient(empty_pool(LAYOUT), LAYOUT, LOOPBACK, timeout_s=0.3)
    with Source([LAYOUT]) as source:
        source.pin(HELD, HELD_TOKENS)
        os.kill(source.process.pid, signal.SIGSTOP)
        _, ending = start(client, source.addresses[0])

        assert "took longer than 0.3 s" in (ending.wait().why or "")
        os.kill(source.process.pid, signal.SIGCONT)
    client.close()


def test_a_rank_that_fails_ends_the_pulls_from_its_siblings(client: TransferClient, pool: DevicePool) -> None:
    first, second = layouts(3, 2)
    asked, left = threading.Event(), threading.Event()

    def serve_nothing(connection: socket.socket) -> None:
        asked.set()
        assert connection.recv(1) == b""
        left.set()

    def break_off(_: socket.socket) -> None:
        assert asked.wait(WAIT_S)

    with raw_server(serve_nothing) as silent, raw_server(break_off) as broken:
        ending = Ending()
        client.pull(make_ref(LAYOUT, [(silent, first), (broken, second)]), 0, TARGETS, ending)
        assert "context rank 1" in (ending.wait().why or "")
        assert left.wait(WAIT_S)
    assert not numbers(pool).any()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "closed the connection"),
        (b"\x01\0\0", "closed the connection"),
        (b"\x09" + bytes(15), "status 9"),
        (ok(1), "1 bytes where"),
        (ok(2**64 - 1), "bytes where"),
        (ok(LAYOUT.page_bytes * 7) + bytes(LAYOUT.page_bytes * 6), "closed the connection"),
        (ok(LAYOUT.page_bytes * 7) + bytes(LAYOUT.page_bytes * 7), "closed the connection"),
        (ok(LAYOUT.page_bytes * 7) + bytes(LAYOUT.page_bytes * 7) + Reply(Status.GONE).encode(), "session ended"),
    ],
    ids=["nothing", "half a reply", "no status", "too little", "too much", "pages lack", "no verdict", "ended"],
)
def test_a_source_that_does_not_keep_to_the_protocol_fails_the_pull(
    client: TransferClient, sent: bytes, why: str
) -> None:
    with raw_server(lambda connection: connection.sendall(sent)) as address:
        _, ending = start(client, address)
        assert why in (ending.wait().why or "")


def test_a_port_that_speaks_something_else_fails_the_pull(client: TransferClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, ending = start(client, f"127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)
            assert "no transfer port" in (ending.wait().why or "")


def test_a_cancelled_pull_ends_once_and_writes_nothing_after_that(client: TransferClient, pool: DevicePool) -> None:
    half, more = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(ok(LAYOUT.page_bytes * 7) + b"\x11" * (LAYOUT.page_bytes * 3))
        half.set()
        assert more.wait(WAIT_S)
        try:
            connection.sendall(b"\x22" * (LAYOUT.page_bytes * 4) + ok())
        except OSError:
            return

    with raw_server(serve) as address:
        pull, ending = start(client, address)
        assert half.wait(WAIT_S)
        until(lambda: bool((numbers(pool)[2] == 0x1111).all()))
        client.cancel(pull)
        client.cancel(pull)
        assert ending.wait().why == "the pull was cancelled"
        pool.tensor.zero_()
        more.set()
    client.close()

    assert len(ending.results) == 1
    assert not numbers(pool).any()
    assert client.num_pulls == 0


def test_a_pull_that_is_cancelled_before_it_could_begin_ends_too(client: TransferClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pull, ending = start(client, f"127.0.0.1:{listener.getsockname()[1]}")
        client.cancel(pull)

        assert ending.wait().why == "the pull was cancelled"


def test_closing_ends_every_pull_and_later_ones_at_once(client: TransferClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        endings = [start(client, address)[1] for _ in range(3)]
        client.close()
        endings.append(start(client, address)[1])

        assert [ending.wait().why for ending in endings] == ["the pull was cancelled"] * 3 + ["the worker is closing"]
    assert client.num_pulls == 0


@pytest.mark.parametrize("piece_bytes", [4 << 20, 1 << 30], ids=["between its pieces", "in its last piece"])
def test_a_pull_over_tcp_does_not_succeed_once_its_session_has_ended(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(pages, "DIRECT_BYTES", piece_bytes)
    pool = empty_pool(BIG, len(BIG_PAGES))
    server = TransferServer(pool, BIG, "127.0.0.1")
    server.start()
    server.pin(SESSION_ID, SECRET, BIG_PAGES, BIG_TOKENS)
    visitor = RawClient(server.address)
    assert visitor.ask(make_request(BIG, num_blocks=len(BIG_PAGES))).status is Status.OK

    first = visitor.read(1)
    server.unpin(SESSION_ID)
    rest = first + visitor.rest()

    whole = BIG.page_bytes * len(BIG_PAGES)
    assert len(rest) < whole if piece_bytes < whole else rest[whole:] == Reply(Status.GONE).encode()
    visitor.close()
    server.close()
    pool.close()


def test_a_pull_through_shared_memory_is_not_confirmed_once_its_session_has_ended() -> None:
    pool = filled_pool(LAYOUT)
    server = TransferServer(pool, LAYOUT, "127.0.0.1")
    server.start()
    server.pin(SESSION_ID, SECRET, HELD, HELD_TOKENS)
    visitor = RawClient(server.address, local=True)
    assert visitor.ask(make_request(LAYOUT, num_blocks=len(HELD))).status is Status.OK
    assert np.array_equal(np.frombuffer(visitor.read(HELD.nbytes), np.int32), HELD)

    assert visitor.ask(make_request(LAYOUT, kind=Kind.CONFIRM)).status is Status.OK
    server.unpin(SESSION_ID)
    assert visitor.ask(make_request(LAYOUT, kind=Kind.CONFIRM)).status is Status.REFUSED
    visitor.close()
    server.close()
    pool.close()


def pull_shared(client: TransferClient, address: str) -> PullResult:
    ending = Ending()
    client.pull(make_ref(LAYOUT, [(address, LAYOUT)], host_key=shared_memory.host_key()), 0, TARGETS, ending)
    return ending.wait()


def test_a_pull_through_shared_memory_that_is_not_confirmed_fails(client: TransferClient) -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(ok(HELD.nbytes) + HELD.tobytes())
        read_request(connection)
        connection.sendall(Reply(Status.REFUSED).encode())

    with raw_local_server(filled_pool(LAYOUT), serve) as address:
        result = pull_shared(client, address)

    assert "refused" in (result.why or "")
    assert result.shared_bytes == LAYOUT.page_bytes * len(HELD)


def test_copying_out_of_shared_memory_stops_as_soon_as_its_owner_says_what_nobody_asked(
    monkeypatch: pytest.MonkeyPatch, client: TransferClient
) -> None:
    monkeypatch.setattr(pages, "DIRECT_BYTES", 1)
    said = ok(HELD.nbytes) + HELD.tobytes() + b"!"

    with raw_local_server(filled_pool(LAYOUT), lambda connection: connection.sendall(said)) as address:
        result = pull_shared(client, address)

    assert "spoke out of turn" in (result.why or "")
    assert result.shared_bytes == LAYOUT.page_bytes


@pytest.mark.anyio
async def test_a_connection_that_the_other_end_closed_is_not_silent() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    connection.require_silence()

    theirs.close()

    with pytest.raises(ConnectionResetError, match="closed the connection"):
        connection.require_silence()
    connection.close()


@pytest.mark.parametrize("page", [-1, NUM_PAGES])
def test_a_page_that_the_shared_pool_does_not_have_fails_the_pull(client: TransferClient, page: int) -> None:
    named = np.array([page, *HELD[1:]], np.int32)
    with raw_local_server(
        filled_pool(LAYOUT), lambda connection: connection.sendall(ok(named.nbytes) + named.tobytes())
    ) as address:
        assert "does not have" in (pull_shared(client, address).why or "")


def test_a_server_that_closes_fails_the_pulls_from_it(client: TransferClient) -> None:
    source = filled_pool(LAYOUT)
    server = TransferServer(source, LAYOUT, "127.0.0.1")
    server.start()
    server.pin(SESSION_ID, SECRET, HELD, HELD_TOKENS)
    _, ending = start(client, server.address)
    assert ending.wait().why is None
    server.close()

    _, ending = start(client, server.address)
    assert "Connect call failed" in (ending.wait().why or "")
    source.close()
