"""APIs that agents look for and that are not served yet: 501, each in its own error shape."""

from __future__ import annotations

from edge.core.errors import Code, EdgeError
from edge.http.asgi import Receive, Scope, Send, request_id, respond
from edge.http.errors import JSON, anthropic_error, send_error


async def messages(scope: Scope, receive: Receive, send: Send) -> None:
    """Anthropic's."""
    own_id = request_id(scope)
    error = EdgeError(Code.NOT_IMPLEMENTED, "The Messages API is not served yet: use /v1/chat/completions.")
    await respond(send, error.status, [JSON, (b"request-id", own_id)], anthropic_error(error, own_id))


async def responses(scope: Scope, receive: Receive, send: Send) -> None:
    """OpenAI's newer API, whose errors look as those of the older one."""
    error = EdgeError(Code.NOT_IMPLEMENTED, "The Responses API is not served yet: use /v1/chat/completions.")
    await send_error(send, error, request_id(scope))
