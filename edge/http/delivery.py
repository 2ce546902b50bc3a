"""From choices to the caller: streamed or whole, cancelled the moment the caller is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from edge.core.errors import EdgeError
from edge.http.asgi import Headers, Receive, Send, respond
from edge.http.body import ClientGone
from edge.http.choice import Choice
from edge.http.errors import JSON
from edge.http.sse import COMMENT, HEADERS, error_event


class Format(Protocol):
    """How one request's answer looks on the wire."""

    def opening(self, choice: Choice) -> bytes: ...
    def more(self, choice: Choice) -> bytes: ...
    def closing(self, choice: Choice) -> bytes: ...
    def end(self, choices: Sequence[Choice]) -> bytes: ...
    def whole(self, choices: Sequence[Choice]) -> bytes: ...


class Delivery:
    """One request's answer on its way to one caller.

    `headers` is called when the status line is due, so that it can tell what is known by then. `went_on` is called
    whenever there may be more. Both methods raise EdgeError as long as nothing was sent, and ClientGone; a failure
    after the first byte ends the stream with an error event and is returned.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        form: Format,
        wake: asyncio.Event,
        send: Send,
        *,
        headers: Callable[[], Headers],
        went_on: Callable[[], None],
    ) -> None:
        self._choices = choices
        self._form = form
        self._wake = wake
        self._send = send
        self._headers = headers
        self._went_on = went_on
        self._open = list(choices)  # those whose end was not written
        self._unopened = set(choices)

    async def whole(self, caller: Caller) -> None:
        while any(not choice.has_ended for choice in self._choices):
            await self._wake.wait()
            self._wake.clear()
            self._notice(caller)
            if (error := self._failure()) is not None:
                raise error
        await respond(self._send, 200, [JSON, *self._headers()], self._form.whole(self._choices))

    async def stream(self, caller: Caller, heartbeat: Heartbeat) -> EdgeError | None:
        has_started = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._notice(caller)
            error = self._failure()
            data = self._take()
            if not has_started:
                if error is not None:
                    raise error
                if not data and not heartbeat.is_due:
                    continue
                has_started = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._headers()]}
                )
            is_over = error is not None or not self._open
            if error is not None:
                data += error_event(error)
            elif is_over:
                data += self._form.end(self._choices)
            elif not data and heartbeat.is_due:
                data = COMMENT
            if data:
                heartbeat.sent()
                await self._send({"type": "http.response.body", "body": data, "more_body": not is_over})
            if is_over:
                return error

    def _notice(self, caller: Caller) -> None:
        if caller.is_gone:
            raise ClientGone
        self._went_on()

    def _failure(self) -> EdgeError | None:
        for choice in self._choices:
            if choice.error is not None:
                return choice.error
        return None

    def _take(self) -> bytes:
        """Whatever is new of every choice, as events."""
        form = self._form
        parts = []
        ended = False
        for choice in self._open:
            if self._unopened and choice.has_begun and choice in self._unopened:
                self._unopened.remove(choice)
                parts.append(form.opening(choice))
            parts.append(form.more(choice))
            if choice.finish_reason is not None:
                parts.append(form.closing(choice))
                ended = True
        if ended:
            self._open = [choice for choice in self._open if choice.finish_reason is None]
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Heartbeat:
    """Says when nothing was sent for `period_s`. One timer a period, however often something is sent."""

    def __init__(self, period_s: float, woken: Callable[[], None]) -> None:
        self._period_s = period_s
        self._woken = woken
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer = self._loop.call_later(period_s, self._tick)
        self.is_due = False

    def sent(self) -> None:
        self._last_s = self._loop.time()
        self.is_due = False

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        rest_s = self._last_s + self._period_s - self._loop.time()
        if rest_s <= 0.0:
            self.is_due = True
            self._woken()
            rest_s = self._period_s
        self._timer = self._loop.call_later(rest_s, self._tick)


class Caller:
    """The other end of the connection, while its answer is made: `is_gone` once it went away.

    A context manager that owns the task which watches. Enter it when the body was read: what `receive` says after that
    is only ever the end.
    """

    def __init__(self, receive: Receive, woken: Callable[[], None]) -> None:
        self._receive = receive
        self._woken = woken
        self._watch: asyncio.Task[None] | None = None
        self.is_gone = False

    def __enter__(self) -> Self:
        self._watch = asyncio.get_running_loop().create_task(self._wait())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._woken()
