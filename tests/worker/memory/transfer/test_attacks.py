"""What whoever can reach a transfer port, or write a session reference, can try."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.worker.memory.transfer.raw import RawClient, make_request
from tests.worker.memory.transfer.samples import (
    HELD,
    HELD_TOKENS,
    SECRET,
    SESSION_ID,
    Ending,
    empty_pool,
    filled_pool,
    layouts,
    make_ref,
)
from worker.core.handoff import SessionRef
from worker.memory.transfer import wire
from worker.memory.transfer.client import TransferClient
from worker.memory.transfer.server import ServerLimits, TransferServer
from worker.memory.transfer.wire import Kind, Reply, Status

LOOPBACK = ("127.0.0.0/8",)
(LAYOUT,) = layouts(3, 1)
HASTY = ServerLimits(max_connections=4, proof_s=1.0, idle_s=20.0, answer_s=20.0)
REFUSED = Reply(Status.REFUSED).encode()


@pytest.fixture
def server() -> Iterator[TransferServer]:
    pool = filled_pool(LAYOUT)
    server = TransferServer(pool, LAYOUT, "127.0.0.1", HASTY)
    server.start()
    server.pin(SESSION_ID, SECRET, HELD, HELD_TOKENS)
    yield server
    server.close()
    pool.close()


@pytest.fixture
def client() -> Iterator[TransferClient]:
    client = TransferClient(empty_pool(LAYOUT), LAYOUT, LOOPBACK, timeout_s=10.0)
    yield client
    client.close()


def ref_to(server: TransferServer, *, host_key: str = "", **changes: str) -> SessionRef:
    return make_ref(LAYOUT, [(server.address, LAYOUT)], host_key=host_key, **changes)  # type: ignore[arg-type]


def why_not(client: TransferClient, ref: SessionRef) -> str:
    ending = Ending()
    client.pull(ref, 0, np.arange(len(HELD), dtype=np.int32), ending)
    return ending.wait().why or ""


@pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
def test_unknown_sessions_wrong_secrets_and_used_ones_get_one_answer(server: TransferServer, local: bool) -> None:
    first = RawClient(server.address, local=local)
    assert first.ask(make_request(LAYOUT)).status is Status.OK
    first.close()

    answers = []
    for request, secret in (
        (make_request(LAYOUT, session_id=b"?" * 16, puller=b"q" * 16), SECRET),
        (make_request(LAYOUT, puller=b"q" * 16), "00" * 32),
        (make_request(LAYOUT), SECRET),
        (make_request(LAYOUT, kind=Kind.RELEASE), SECRET),
        (make_request(LAYOUT, kind=Kind.CONFIRM, puller=b"q" * 16), SECRET),
    ):
        visitor = RawClient(server.address, local=local)
        visitor.socket.sendall(visitor.encode(request, secret))
        answers.append(visitor.rest())
        visitor.close()

    assert answers == [REFUSED] * 5


def test_an_expired_session_is_refused_like_one_that_never_was(server: TransferServer, client: TransferClient) -> None:
    server.unpin(SESSION_ID)

    expired = why_not(client, ref_to(server))
    never = why_not(client, ref_to(server, session_id="00" * 16))

    assert "refused" in expired
    assert expired == never
    assert server.num_sessions == 0


def test_a_rank_pulls_a_session_once(server: TransferServer, client: TransferClient) -> None:
    assert why_not(client, ref_to(server)) == ""
    assert "refused" in why_not(client, ref_to(server))
    assert "refused" in why_not(client, ref_to(server, host_key=server.host_key))


def test_heads_are_pulled_once_and_by_one_retry_elsewhere(server: TransferServer) -> None:
    statuses = []
    for puller, heads in ((b"1", (0, 2)), (b"2", (2, 3)), (b"3", (0, 3)), (b"4", (1, 2)), (b"5", (2, 3))):
        visitor = RawClient(server.address)
        request = make_request(LAYOUT, puller=puller * 16, head_start=heads[0], head_stop=heads[1])
        statuses.append(visitor.ask(request).status)
        visitor.close()

    assert statuses == [Status.OK, Status.OK, Status.OK, Status.REFUSED, Status.REFUSED]


def test_a_request_that_was_overheard_is_worth_nothing(server: TransferServer) -> None:
    victim = RawClient(server.address)
    request = victim.encode(make_request(LAYOUT))

    elsewhere = RawClient(server.address)
    elsewhere.socket.sendall(request)
    assert elsewhere.rest() == REFUSED

    victim.socket.sendall(request)
    assert Reply.decode(victim.read(wire.REPLY_BYTES)).status is Status.OK
    victim.read(LAYOUT.page_bytes + wire.REPLY_BYTES)
    confirm = victim.encode(make_request(LAYOUT, kind=Kind.CONFIRM))
    victim.socket.sendall(confirm)
    assert Reply.decode(victim.read(wire.REPLY_BYTES)).status is Status.OK
    victim.socket.sendall(confirm)
    assert victim.rest() == REFUSED
    for each in (victim, elsewhere):
        each.close()


def test_a_request_that_was_altered_on_its_way_is_refused(server: TransferServer) -> None:
    for at in range(wire.REQUEST_BYTES):
        visitor = RawClient(server.address)
        request = bytearray(visitor.encode(make_request(LAYOUT, puller=at.to_bytes(16, "little"))))
        request[at] ^= 1
        visitor.socket.sendall(request)
        assert Status.OK.to_bytes() != visitor.rest()[:1]
        visitor.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"first_block": 7},
        {"num_blocks": 8},
        {"num_blocks": 0},
        {"first_block": 2**32 - 1, "num_blocks": 2**32 - 1},
        {"head_stop": 4},
        {"head_start": 2, "head_stop": 2},
        {"head_start": 3, "head_stop": 4},
        {"shape": b"x" * 16},
    ],
)
def test_blocks_heads_and_shapes_beyond_the_session_are_refused(
    server: TransferServer, changes: dict[str, Any]
) -> None:
    visitor = RawClient(server.address)

    assert visitor.ask(make_request(LAYOUT, **changes)).status is Status.MISMATCH
    assert visitor.rest() == b""
    visitor.close()


def test_a_rank_that_holds_other_heads_refuses_those_it_lacks() -> None:
    held = layouts(3, 2)[1]
    pool = filled_pool(held)
    server = TransferServer(pool, held, "127.0.0.1")
    server.start()
    server.pin(SESSION_ID, SECRET, HELD, HELD_TOKENS)

    visitor = RawClient(server.address)
    assert visitor.ask(make_request(held, head_start=1, head_stop=3)).status is Status.MISMATCH
    visitor.close()
    server.close()
    pool.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\0" * 500, os.urandom(1 << 20)])
def test_whoever_does_not_speak_the_protocol_gets_nothing_and_is_hung_up_on(
    server: TransferServer, sent: bytes
) -> None:
    visitor = RawClient(server.address)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        visitor.socket.sendall(sent)

    assert visitor.rest() in (b"", REFUSED)
    visitor.close()


def test_a_byte_at_a_time_is_cut_off_after_the_same_time(server: TransferServer) -> None:
    visitor = RawClient(server.address)
    request = visitor.encode(make_request(LAYOUT))
    stop = threading.Event()

    def drip() -> None:
        for byte in request:
            if stop.wait(0.05):
                return
            try:
                visitor.socket.send(bytes([byte]))
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert visitor.rest() == b""
    stop.set()
    dripping.join()
    visitor.close()


def test_silent_connections_make_room_for_those_that_prove_themselves(
    server: TransferServer, client: TransferClient
) -> None:
    host, _, port = server.address.rpartition(":")
    crowd = [socket.create_connection((host, int(port))) for _ in range(3 * HASTY.max_connections)]

    assert why_not(client, ref_to(server)) == ""

    for each in crowd:
        each.close()


def test_connections_that_hold_secrets_are_not_pushed_out(server: TransferServer) -> None:
    proven = []
    for at in range(HASTY.max_connections):
        session_id = f"{at + 1:032x}"
        server.pin(session_id, SECRET, HELD, HELD_TOKENS)
        proven.append(RawClient(server.address, local=True))
        request = make_request(LAYOUT, session_id=bytes.fromhex(session_id))
        assert proven[-1].ask(request).status is Status.OK
        proven[-1].read(4)

    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as late:
        assert late.recv(1) == b""
    for at, each in enumerate(proven):
        request = make_request(LAYOUT, kind=Kind.CONFIRM, session_id=bytes.fromhex(f"{at + 1:032x}"))
        assert each.ask(request).status is Status.OK
        each.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::ffff:127.0.0.1"])
def test_an_address_outside_of_the_allowed_networks_is_not_even_dialled(host: str) -> None:
    pool = empty_pool(LAYOUT)
    client = TransferClient(pool, LAYOUT, ("10.0.0.0/8",), timeout_s=10.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ref = make_ref(LAYOUT, [(f"{host}:{listener.getsockname()[1]}", LAYOUT)], host_key="any")
        assert "allowed_networks" in why_not(client, ref)
        client.release(ref)
        client.close()

        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    pool.close()


def test_no_rank_of_a_group_is_dialled_if_one_must_not_be(client: TransferClient) -> None:
    first, second = layouts(3, 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        good = f"127.0.0.1:{listener.getsockname()[1]}"
        assert "allowed_networks" in why_not(client, make_ref(LAYOUT, [(good, first), ("192.0.2.1:80", second)]))

        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"head_dim": 8}, {"num_layers": 3}, {"tokens_per_block": 4}])
def test_pages_of_another_shape_are_refused_by_name_before_anything_is_dialled(
    client: TransferClient, change: dict[str, object]
) -> None:
    ref = make_ref(dataclasses.replace(LAYOUT, **change), [("127.0.0.1:1", LAYOUT)])  # type: ignore[arg-type]

    assert f"{next(iter(change))} is" in why_not(client, ref)


def test_blocks_that_the_session_has_not_are_refused_before_anything_is_dialled(client: TransferClient) -> None:
    ref = make_ref(LAYOUT, [("127.0.0.1:1", LAYOUT)], num_tokens=HELD_TOKENS - 2)

    assert "6 blocks" in why_not(client, ref)


def test_the_memory_that_is_shared_cannot_be_mapped_for_writing(server: TransferServer) -> None:
    visitor = RawClient(server.address, local=True)
    visitor.socket.sendall(visitor.encode(make_request(LAYOUT, kind=Kind.MAP)))
    data, descriptors, _, _ = socket.recv_fds(visitor.socket, wire.REPLY_BYTES, 4)
    num_bytes = Reply.decode(data).num_bytes
    visitor.close()

    assert len(descriptors) == 1
    with pytest.raises(PermissionError):
        mmap.mmap(descriptors[0], num_bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptors[0], b"x")
    os.close(descriptors[0])


def test_memory_is_shared_on_no_network_socket_and_with_no_stranger(server: TransferServer) -> None:
    over_tcp = RawClient(server.address)
    assert over_tcp.ask(make_request(LAYOUT, kind=Kind.MAP)).status is Status.REFUSED
    stranger = RawClient(server.address, local=True)
    assert stranger.ask(make_request(LAYOUT, kind=Kind.MAP), secret="00" * 32).status is Status.REFUSED
    for each in (over_tcp, stranger):
        each.close()


def test_only_who_holds_the_secret_releases_a_session() -> None:
    pool = filled_pool(LAYOUT)
    server = TransferServer(pool, LAYOUT, "127.0.0.1")
    released: list[str] = []
    came = threading.Event()

    def on_release(session_id: str) -> None:
        released.append(session_id)
        came.set()

    server.on_release(on_release)
    server.start()
    server.pin(SESSION_ID, SECRET, HELD, HELD_TOKENS)

    stranger = RawClient(server.address)
    assert stranger.ask(make_request(LAYOUT, kind=Kind.RELEASE), secret="00" * 32).status is Status.REFUSED
    stranger.close()
    assert released == []

    client = TransferClient(empty_pool(LAYOUT), LAYOUT, LOOPBACK, timeout_s=10.0)
    client.release(ref_to(server))
    assert came.wait(10.0)
    assert released == [SESSION_ID]
    client.close()
    server.close()
    pool.close()
