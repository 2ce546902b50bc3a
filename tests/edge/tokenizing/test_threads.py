"""Whose work the threads do next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from edge.tokenizing.threads import TurnThreads

pytestmark = pytest.mark.anyio


class Log:
    """What the one thread did, held up until `go`."""

    def __init__(self) -> None:
        self.threads = TurnThreads(1)
        self.done: list[str] = []
        self.go = threading.Event()

    def noting(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.go.wait(10.0)
            self.done.append(name)
            return name

        return work

    def start(self, tenant: bytes, name: str, cost: int = 10) -> asyncio.Task[str]:
        return asyncio.create_task(self.threads.run(tenant, cost, self.noting(name)))


async def test_a_tenants_thousands_wait_behind_themselves() -> None:
    log = Log()
    tasks = [log.start(b"flooder", f"f{number}") for number in range(1000)]
    await asyncio.sleep(0)
    tasks.append(log.start(b"quiet", "q"))
    await asyncio.sleep(0)
    log.go.set()

    answers = await asyncio.gather(*tasks)

    assert log.done.index("q") <= 2
    assert [name for name in log.done if name != "q"] == [f"f{number}" for number in range(1000)]
    assert sorted(answers) == sorted(log.done)
    log.threads.close()


async def test_what_is_cancelled_while_it_waits_is_never_done_and_holds_up_nobody() -> None:
    log = Log()
    tasks = [log.start(b"a", name) for name in ("runs", "cancelled", "stays")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    log.go.set()

    await asyncio.gather(*tasks, return_exceptions=True)

    assert log.done == ["runs", "stays"]
    assert await log.start(b"b", "after") == "after"
    log.threads.close()


async def test_a_thread_whose_caller_left_is_free_once_it_is_done_and_not_before() -> None:
    log = Log()
    left = log.start(b"a", "left")
    await asyncio.sleep(0.01)
    left.cancel()
    following = log.start(b"a", "following")
    await asyncio.sleep(0.01)
    assert log.done == []
    log.go.set()

    assert await following == "following"

    assert log.done == ["left", "following"]
    log.threads.close()


async def test_a_failure_is_the_callers_and_frees_the_thread() -> None:
    log = Log()
    log.go.set()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await log.threads.run(b"a", 1, fail)
    assert await log.start(b"a", "next") == "next"
    log.threads.close()
