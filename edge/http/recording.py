"""GET /kinroute/v1/recording: what `kinroute record` follows, JSON lines without end.

`salt`: 16 to 64 bytes in hex, the same for all edges that one recording follows, and for none else. `block_tokens`:
tokens of the blocks that prompts are told in.
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

import orjson

from edge.http.asgi import Receive, Scope, Send, respond
from edge.recordings import MAX_RECORDINGS, Recording, Recordings

PATH = "/kinroute/v1/recording"
USUAL_BLOCK_TOKENS = 64
MAX_BLOCK_TOKENS = 65_536
MIN_SALT_BYTES, MAX_SALT_BYTES = 16, 64


class RecordingStream:
    """An ASGI application for callers who may record."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _asked(scope)
        if isinstance(asked, str):
            await _refuse(send, 400, asked)
            return
        recording = self._recordings.begin(*asked)
        if recording is None:
            await _refuse(send, 503, f"{MAX_RECORDINGS} recordings are followed already: end one of them")
            return
        try:
            await _stream(recording, receive, send)
        finally:
            self._recordings.end(recording)


async def _stream(recording: Recording, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(_until_gone(receive, recording))
        async for line in recording.lines():
            await send({"type": "http.response.body", "body": line, "more_body": True})
        listening.cancel()
    await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive, recording: Recording) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    recording.stop()


async def _refuse(send: Send, status: int, why: str) -> None:
    await respond(send, status, [(b"content-type", b"application/json")], orjson.dumps({"error": why}))


def _asked(scope: Scope) -> tuple[bytes, int] | str:
    """Salt and tokens of a block; or what is wrong with them."""
    given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    unknown = given.keys() - {"salt", "block_tokens"}
    if unknown:
        return f"the query has salt and block_tokens, not {min(unknown)[:40]!r}"
    try:
        salt = bytes.fromhex(given.get("salt", [""])[-1])
    except ValueError:
        salt = b""
    if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
        return f"salt must be {MIN_SALT_BYTES} to {MAX_SALT_BYTES} random bytes in hex"
    text = given.get("block_tokens", [str(USUAL_BLOCK_TOKENS)])[-1]
    block_tokens = int(text) if text.isdecimal() and len(text) <= len(str(MAX_BLOCK_TOKENS)) else 0
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        return f"block_tokens must be a number from 1 to {MAX_BLOCK_TOKENS}"
    return salt, block_tokens
