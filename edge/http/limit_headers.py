"""Where a tenant stands with its limits, in the headers that OpenAI's callers read."""

from __future__ import annotations

import time

from edge.core.admission import Admission, Standing
from edge.core.types import Principal
from edge.http.asgi import Headers, Message, Send


class LimitHeaders:
    """A `send` that adds them to the status line, whatever it says, once it is known who calls."""

    __slots__ = ("_admission", "_send", "principal")

    def __init__(self, send: Send, admission: Admission) -> None:
        self._send = send
        self._admission = admission
        self.principal: Principal | None = None

    async def __call__(self, message: Message) -> None:
        if self.principal is not None and message["type"] == "http.response.start":
            standing = self._admission.standing(self.principal, time.monotonic())
            message["headers"] = [*message["headers"], *limit_headers(standing)]
        await self._send(message)


def limit_headers(standing: Standing) -> Headers:
    """Nothing of a limit that there is not."""
    headers: Headers = []
    for name, quota in ((b"requests", standing.requests), (b"tokens", standing.tokens)):
        if quota is not None:
            headers += (
                (b"x-ratelimit-limit-" + name, b"%d" % quota.limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % quota.remaining),
                (b"x-ratelimit-reset-" + name, duration(quota.reset_s).encode()),
            )
    return headers


def duration(time_s: float) -> str:
    """As Go writes one, to the millisecond: `0s`, `12ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    ms = round(time_s * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    seconds = f"{ms / 1000:g}s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"
