"""What an edge has to tell one worker and has not sent yet."""

from __future__ import annotations

import asyncio
from collections import deque

from enginelink.v1 import link_pb2

FULL_BYTES = 8 << 20
"""From here on a message takes no further request: far below what a worker accepts, however long one prompt is."""


class Outbox:
    """Gathers what is said in one turn of the event loop, and while an earlier message is on its way, into one message.

    Only long prompts make it more than one. Order is kept between messages; within one, requests come before cancels,
    and both before updates.
    """

    def __init__(self) -> None:
        self._messages: deque[link_pb2.EdgeMessage] = deque()
        self._last_bytes = 0
        self._filled = asyncio.Event()

    def submit(self, submit: link_pb2.Submit) -> None:
        if self._last_bytes >= FULL_BYTES:
            self._open()
        self._last().submits.append(submit)
        self._last_bytes += len(submit.token_ids)

    def cancel(self, handle: int) -> None:
        self._last().cancels.append(link_pb2.Cancel(handle=handle))

    def update(self, update: link_pb2.ConversationUpdate) -> None:
        self._last().updates.append(update)

    def subscribe(self, subscribe: link_pb2.KvSubscribe) -> None:
        """A later one takes the place of one that was not sent yet."""
        self._last().kv_subscribe.CopyFrom(subscribe)

    async def take(self) -> link_pb2.EdgeMessage:
        """The oldest message, once there is one."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()

    def _last(self) -> link_pb2.EdgeMessage:
        if not self._messages:
            self._open()
        return self._messages[-1]

    def _open(self) -> None:
        self._messages.append(link_pb2.EdgeMessage())
        self._last_bytes = 0
        self._filled.set()
