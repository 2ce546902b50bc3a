"""Fetching an issuer's keys from servers that speak no clean HTTP, or never end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from edge.core.errors import Code, EdgeError
from edge.core.jwt_keys import KeySet
from edge.jwks import Jwks
from tests.edge.issuer import jwk, jwks

WAIT_S = 20.0
BODY = jwks(jwk("ES256", "k"))
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
BROKEN = {
    "nothing": b"",
    "noise": bytes(range(256)) * 16,
    "a version that is none": b"HTTP/9.9 200 OK\r\n\r\n",
    "a status that is none": b"HTTP/1.1 abc OK\r\n\r\n",
    "headers that are none": b"HTTP/1.1 200 OK\r\n\xff\xfe: \x00\r\n\r\n",
    "headers without an end": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000,
    "a length that is none": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "a body that is cut": GOOD[:-10],
    "chunks that are none": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a protocol that is switched": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "only interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 1_000,
    "text that is no UTF-8": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n\xff\xfe\xfd",
}


@asynccontextmanager
async def server(answers: list[bytes], *, drip: bool = False) -> AsyncIterator[str]:
    """Gives the first of `answers`, and closes; the last one stays. `drip`: but goes on with a byte now and then, for
    as long as somebody reads, except after the last."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            is_last = len(answers) == 1
            writer.write(answers[0] if is_last else answers.pop(0))
            while drip and not is_last:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/keys"


@asynccontextmanager
async def running(url: str, told: list[KeySet], *, deadline_s: float = 5.0) -> AsyncIterator[Jwks]:
    fetching = Jwks(
        url,
        told.append,
        refresh_s=3600.0,
        keep_stale_s=3600.0,
        tls=httpx.create_ssl_context(trust_env=False),
        min_interval_s=0.05,
        deadline_s=deadline_s,
    )
    task = asyncio.create_task(fetching.run())
    try:
        yield fetching
        assert not task.done(), "it goes on whatever comes"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_told(told: list[KeySet]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not told:
            await asyncio.sleep(0.01)


@pytest.mark.anyio
@pytest.mark.parametrize("what", BROKEN)
async def test_an_answer_that_is_no_http_is_a_failure_and_the_next_try_is_another(what: str) -> None:
    told: list[KeySet] = []
    async with server([BROKEN[what], GOOD]) as url, running(url, told):
        await until_told(told)

    assert [key.kid for keys in told for key in keys.keys] == ["k"]


@pytest.mark.anyio
async def test_an_answer_that_drips_is_given_up_at_the_deadline() -> None:
    told: list[KeySet] = []
    start = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"
    async with server([start, GOOD], drip=True) as url, running(url, told, deadline_s=0.3):
        await until_told(told)

    assert [key.kid for key in told[0].keys] == ["k"]


@pytest.mark.anyio
async def test_who_seeks_a_key_while_nobody_answers_is_told_to_come_again() -> None:
    told: list[KeySet] = []
    async with server([b""]) as url, running(url, told) as fetching:
        with pytest.raises(EdgeError) as caught:
            await asyncio.wait_for(fetching.seek("k"), WAIT_S)

    assert (caught.value.code, caught.value.retryable, caught.value.reason) == (Code.OVERLOADED, True, "no keys")
    assert told == []
