"""Server-sent events, written by hand: what does not change within a request is made once."""

from __future__ import annotations

import orjson

from edge.core.errors import EdgeError
from edge.http.errors import openai_error

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def error_event(error: EdgeError) -> bytes:
    """The end of an answer that failed after its first byte; no [DONE] follows it."""
    return event(openai_error(error))


class ChunkFrame:
    """The parts of a choice's chunks around what is new in each.

    `members`: the chunk's own, before `choices`. `null_usage`: every chunk says `"usage": null`, as OpenAI's do when
    the last one will tell the usage.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, members: dict[str, object], index: int, *, null_usage: bool) -> None:
        self._before = b'data: %b,"choices":[{"index":%d,' % (orjson.dumps(members)[:-1], index)
        self._after = b'}],"usage":null}\n\n' if null_usage else b"}]}\n\n"

    def chunk(self, content: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null") -> bytes:
        """`content`: the member that holds what is new, such as `"delta":{...}`."""
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before,
            content,
            logprobs,
            finish_reason,
            self._after,
        )


def usage_chunk(members: dict[str, object], usage: dict[str, object]) -> bytes:
    """The last chunk, of no choice."""
    return event(orjson.dumps({**members, "choices": [], "usage": usage}))
