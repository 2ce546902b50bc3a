"""A well-behaved tenant beside an attack: what it streams completes, whole, all the while."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import httpx

from tests.attacks.callers import BOB
from tests.attacks.doors import BODY, CHAT, WAIT_S, Doors

TOKENS = 20


class Beside:
    """Asks one request after the other until the block ends, and at least one that began after it was entered and one
    that ended before it was left. Raises AssertionError where one of them was not served whole."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._stop = threading.Event()
        self._once = threading.Event()
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self.answers = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        served = self._once.wait(WAIT_S)
        self._stop.set()
        self._thread.join(WAIT_S)
        if error is None:
            assert served, "nothing of the other tenant completed"
            assert not self._failures, self._failures

    def _run(self) -> None:
        body = BODY | {"stream": True, "max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True}
        with self._doors.client(BOB) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(CHAT, json=body)
                except httpx.HTTPError as error:
                    self._failures.append(repr(error))
                else:
                    if answer.status_code != 200 or not answer.text.endswith("data: [DONE]\n\n"):
                        self._failures.append(answer.text[-300:])
                self.answers += 1
                self._once.set()
