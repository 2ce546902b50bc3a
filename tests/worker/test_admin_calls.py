"""What an operator may ask, and what is said to calls that ask it wrongly. Over the ASGI application itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from worker.admin import MAX_BODY_BYTES, Admin, Message

KEY = "ab" * 32

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Worker:
    """Says what it was asked."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    starting: bool = False
    live: bool = True

    def is_starting(self) -> bool:
        return self.starting

    def is_live(self) -> bool:
        return self.live

    def is_ready(self) -> bool:
        return self.live and not self.starting

    def state(self) -> dict[str, Any]:
        return {"state": "ready"}

    async def leaks(self) -> dict[str, Any]:
        return self._note("leaks")

    async def clear_cache(self, *, tenant: bytes | None, family: str | None) -> dict[str, Any]:
        return self._note("clear", tenant, family)

    async def families(self, *, family: str | None, limit: int) -> dict[str, Any]:
        return self._note("families", family, limit)

    async def dry_run(self, parent: str) -> dict[str, Any]:
        return self._note("dry_run", parent)

    async def block(self, key: bytes) -> dict[str, Any]:
        return self._note("block", key)

    def _note(self, *asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        return {"ok": True}


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
async def client(worker: Worker) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(Admin(worker))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "body", "asked"),
    [
        ("GET", "/kinroute/v1/leaks", b"", ("leaks",)),
        ("GET", "/kinroute/v1/families", b"", ("families", None, 100)),
        ("GET", "/kinroute/v1/families?family=a%20%C3%BC&limit=1000", b"", ("families", "a ü", 1000)),
        ("GET", f"/kinroute/v1/blocks/{KEY}", b"", ("block", bytes.fromhex(KEY))),
        ("GET", f"/kinroute/v1/blocks/{KEY.upper()}", b"", ("block", bytes.fromhex(KEY))),
        ("POST", "/kinroute/v1/cache/clear", b"", ("clear", None, None)),
        ("POST", "/kinroute/v1/cache/clear", b'{"scope": "all"}', ("clear", None, None)),
        ("POST", "/kinroute/v1/cache/clear", b'{"tenant": "00ff"}', ("clear", b"\x00\xff", None)),
        ("POST", "/kinroute/v1/cache/clear", b'{"tenant": ""}', ("clear", b"", None)),
        ("POST", "/kinroute/v1/cache/clear", b'{"family": "root"}', ("clear", None, "root")),
        ("POST", "/kinroute/v1/demotions/dry-run", b'{"parent": "root"}', ("dry_run", "root")),
    ],
)
async def test_a_call_reaches_the_engine(
    client: httpx.AsyncClient, worker: Worker, method: str, path: str, body: bytes, asked: tuple[Any, ...]
) -> None:
    answer = await client.request(method, path, content=body)

    assert (answer.status_code, answer.json()) == (200, {"ok": True})
    assert worker.asked == [asked]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/kinroute/v1/nothing", b"", 404, "no /kinroute/v1/nothing here"),
        ("GET", "/kinroute/v1/blocks", b"", 404, "no /kinroute/v1/blocks here"),
        ("POST", "/kinroute/v1/families", b"", 405, "answers GET"),
        ("DELETE", f"/kinroute/v1/blocks/{KEY}", b"", 405, "answers GET"),
        ("GET", "/kinroute/v1/demotions/dry-run", b"", 405, "answers POST"),
        ("GET", "/kinroute/v1/cache/clear", b"", 405, "answers POST"),
        ("GET", "/kinroute/v1/blocks/xyz", b"", 400, "'xyz': it must be 64 hexadecimal digits"),
        ("GET", f"/kinroute/v1/blocks/{KEY[:-1]}g", b"", 400, "64 hexadecimal digits"),
        ("GET", f"/kinroute/v1/blocks/{KEY}/x", b"", 400, "64 hexadecimal digits"),
        ("GET", "/kinroute/v1/families?limit=0", b"", 400, "limit is '0': it must be 1 to 1000"),
        ("GET", "/kinroute/v1/families?limit=1001", b"", 400, "1 to 1000"),
        ("GET", "/kinroute/v1/families?limit=%D9%A3", b"", 400, "1 to 1000"),
        ("GET", "/kinroute/v1/families?family=", b"", 400, "family is empty"),
        ("GET", "/kinroute/v1/families?family=%ff", b"", 400, "query"),
        ("GET", "/kinroute/v1/families?families=x", b"", 400, "may hold family and limit, each once"),
        ("GET", "/kinroute/v1/families?limit=1&limit=2", b"", 400, "each once"),
        ("POST", "/kinroute/v1/cache/clear", b"{}", 400, "name one thing to clear"),
        ("POST", "/kinroute/v1/cache/clear", b'{"scope": "all", "family": "x"}', 400, "name one thing to clear"),
        ("POST", "/kinroute/v1/cache/clear", b'{"scope": "some"}', 400, "a JSON object with scope, tenant, family"),
        ("POST", "/kinroute/v1/cache/clear", b'{"tenant": "abc"}', 400, "tenant is 'abc': it must be a cache salt"),
        ("POST", "/kinroute/v1/cache/clear", b'{"tenant": "xy"}', 400, "hexadecimal"),
        ("POST", "/kinroute/v1/cache/clear", b'{"family": ""}', 400, "family is empty"),
        ("POST", "/kinroute/v1/cache/clear", b'{"family": "\\ud800"}', 400, "JSON object"),
        ("POST", "/kinroute/v1/cache/clear", b'{"famly": "x"}', 400, "unknown field `famly`"),
        ("POST", "/kinroute/v1/cache/clear", b"[" * 60_000, 400, "JSON object"),
        ("POST", "/kinroute/v1/cache/clear", b"\xff", 400, "JSON object"),
        ("POST", "/kinroute/v1/demotions/dry-run", b"", 400, "a JSON object with parent"),
        ("POST", "/kinroute/v1/demotions/dry-run", b"{}", 400, "missing required field `parent`"),
        ("POST", "/kinroute/v1/demotions/dry-run", b'{"parent": 3}', 400, "Expected `str`"),
        ("POST", "/kinroute/v1/cache/clear", b" " * (MAX_BODY_BYTES + 1), 413, "more than 65536 bytes"),
    ],
)
async def test_a_wrong_call_is_refused_and_asks_nothing(
    client: httpx.AsyncClient, worker: Worker, method: str, path: str, body: bytes, status: int, message: str
) -> None:
    answer = await client.request(method, path, content=body)

    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text
    assert worker.asked == []


@pytest.mark.parametrize(("starting", "live", "why"), [(True, True, "starting"), (False, False, "lost")])
async def test_an_engine_that_is_not_there_is_not_waited_for(
    client: httpx.AsyncClient, worker: Worker, starting: bool, live: bool, why: str
) -> None:
    worker.starting, worker.live = starting, live

    refused = await client.post("/kinroute/v1/cache/clear")

    assert (refused.status_code, refused.json()["error"]) == (503, f"the engine is {why}")
    assert (await client.get("/kinroute/v1/state")).status_code == 200
    assert worker.asked == []


async def test_a_caller_that_leaves_in_the_middle_of_its_call_clears_nothing(worker: Worker) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b"", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/kinroute/v1/cache/clear", "query_string": b""}
    async with asyncio.timeout(5.0):
        await Admin(worker)(scope, receive, send)

    assert (worker.asked, sent) == ([], [])
