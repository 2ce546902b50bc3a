"""The whole HTTP application: hot routes by one look-up, everything else by FastAPI."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from edge.core.errors import Code, EdgeError
from edge.http.asgi import App, Message, Receive, Scope, Send, abort, request_id, respond
from edge.http.errors import error_headers, openai_error, send_error

log = structlog.get_logger()


class Application:
    """`posts`: path to a plain ASGI application that serves its POSTs. `rest` serves what is not there."""

    def __init__(self, posts: Mapping[str, App], rest: App) -> None:
        self._posts = posts
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        post = self._posts.get(scope["path"])
        if post is not None and scope["method"] != "POST":
            await _refuse_method(scope, send)
            return
        answer = _Answer(send)
        try:
            await (post or self._rest)(scope, receive, answer.send)
        except Exception:
            log.exception("a request failed by our own fault", path=scope["path"])
            if answer.has_begun:
                abort(scope)
            else:
                await send_error(send, EdgeError(Code.INTERNAL, "Something went wrong here."), request_id(scope))


class _Answer:
    """Remembers whether a status line went out."""

    __slots__ = ("_send", "has_begun")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def send(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)


async def _refuse_method(scope: Scope, send: Send) -> None:
    error = EdgeError(Code.METHOD_NOT_ALLOWED, f"{scope['path']} answers POST, not {scope['method']}.")
    headers = [*error_headers(error, request_id(scope)), (b"allow", b"POST")]
    await respond(send, error.status, headers, openai_error(error))
