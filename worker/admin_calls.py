"""What an operator may ask of a worker: reads the calls, asks the engine, and says what was wrong with a call.

GET  /kinroute/v1/state                what this worker is, and how it is
GET  /kinroute/v1/leaks                what is held on every rank; nothing must be when nothing runs
GET  /kinroute/v1/families             conversations with their parents and what they own; ?family= and ?limit=
GET  /kinroute/v1/blocks/<64 hex>      where the block with this key is, or why it is not
POST /kinroute/v1/cache/clear          forget what nobody uses: {"scope": "all"}, {"tenant": hex} or {"family": id}
POST /kinroute/v1/demotions/dry-run    what a return of {"parent": id} would demote now, what stays, and why
"""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import msgspec

CALL_DEADLINE_S = 30.0
DEFAULT_LISTED = 100
MAX_LISTED = 1000
BLOCKS = "/kinroute/v1/blocks/"
HEX = re.compile(r"[0-9a-fA-F]*")
KEY_DIGITS = 64

Answer: TypeAlias = tuple[int, dict[str, Any]]


class Operated(Protocol):
    """The worker, as its operator sees it. What is awaited is answered by the engine, between steps."""

    def is_starting(self) -> bool: ...
    def is_live(self) -> bool: ...
    def state(self) -> dict[str, Any]: ...
    async def leaks(self) -> dict[str, Any]: ...
    async def clear_cache(self, *, tenant: bytes | None, family: str | None) -> dict[str, Any]: ...
    async def families(self, *, family: str | None, limit: int) -> dict[str, Any]: ...
    async def dry_run(self, parent: str) -> dict[str, Any]: ...
    async def block(self, key: bytes) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """`rest`: of the path, behind a prefix."""

    query: bytes
    body: bytes
    rest: str = ""


class BadCall(Exception):
    """Raised when a call says what it must not; the message is for whoever sent it."""


class Clear(msgspec.Struct, forbid_unknown_fields=True):
    scope: Literal["all"] | None = None
    tenant: str | None = None
    family: str | None = None


class DryRun(msgspec.Struct, forbid_unknown_fields=True):
    parent: str


class Calls:
    """Every path under /kinroute/v1/."""

    def __init__(self, worker: Operated) -> None:
        self._worker = worker
        self._pages: Mapping[str, tuple[str, Callable[[Call], Awaitable[dict[str, Any]]]]] = {
            "/kinroute/v1/leaks": ("GET", self._leaks),
            "/kinroute/v1/families": ("GET", self._families),
            "/kinroute/v1/cache/clear": ("POST", self._clear),
            "/kinroute/v1/demotions/dry-run": ("POST", self._dry_run),
        }

    def method_of(self, path: str) -> str | None:
        """What `path` answers to; None: there is no such path."""
        if path == "/kinroute/v1/state" or path.startswith(BLOCKS):
            return "GET"
        page = self._pages.get(path)
        return page[0] if page is not None else None

    async def answer(self, path: str, query: bytes, body: bytes) -> Answer:
        """Status and JSON. `path` is one that `method_of` knows."""
        worker = self._worker
        if path == "/kinroute/v1/state":
            return 200, worker.state()
        if worker.is_starting() or not worker.is_live():
            return 503, {"error": f"the engine is {'starting' if worker.is_starting() else 'lost'}"}
        act = self._block if path.startswith(BLOCKS) else self._pages[path][1]
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                return 200, await act(Call(query, body, path.removeprefix(BLOCKS)))
        except BadCall as error:
            return 400, {"error": str(error)}
        except TimeoutError:
            return 503, {"error": f"the engine did not answer in {CALL_DEADLINE_S:.0f} s"}

    async def _leaks(self, call: Call) -> dict[str, Any]:
        return await self._worker.leaks()

    async def _families(self, call: Call) -> dict[str, Any]:
        given = _query(call.query, ("family", "limit"))
        limit = given.get("limit", str(DEFAULT_LISTED))
        if not limit.isascii() or not limit.isdecimal() or len(limit) > 6 or not 1 <= int(limit) <= MAX_LISTED:
            raise BadCall(f"limit is {limit[:80]!r}: it must be 1 to {MAX_LISTED}")
        family = given.get("family")
        return await self._worker.families(
            family=None if family is None else _conversation("family", family), limit=int(limit)
        )

    async def _clear(self, call: Call) -> dict[str, Any]:
        if not call.body:
            return await self._worker.clear_cache(tenant=None, family=None)
        given = _body(call.body, Clear)
        if [given.scope, given.tenant, given.family].count(None) != 2:
            raise BadCall('name one thing to clear: {"scope": "all"}, {"tenant": hex} or {"family": conversation}')
        tenant = None if given.tenant is None else _hex("tenant", given.tenant)
        family = None if given.family is None else _conversation("family", given.family)
        return await self._worker.clear_cache(tenant=tenant, family=family)

    async def _dry_run(self, call: Call) -> dict[str, Any]:
        return await self._worker.dry_run(_conversation("parent", _body(call.body, DryRun).parent))

    async def _block(self, call: Call) -> dict[str, Any]:
        if len(call.rest) != KEY_DIGITS or not HEX.fullmatch(call.rest):
            raise BadCall(f"the block's key is {call.rest[:80]!r}: it must be {KEY_DIGITS} hexadecimal digits")
        return await self._worker.block(bytes.fromhex(call.rest))


Body = TypeVar("Body", bound=msgspec.Struct)


def _body(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        keys = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise BadCall(f"the body must be a JSON object with {keys}: {error}") from error


def _query(query: bytes, known: tuple[str, ...]) -> dict[str, str]:
    try:
        pairs = urllib.parse.parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=8)
    except ValueError as error:
        raise BadCall("the query is not one that can be read") from error
    given = dict(pairs)
    unknown = given.keys() - set(known)
    if unknown or len(given) != len(pairs):
        raise BadCall(f"the query may hold {' and '.join(known)}, each once")
    return given


def _conversation(key: str, value: str) -> str:
    if not value:
        raise BadCall(f"{key} is empty: it must be a conversation's id")
    return value


def _hex(key: str, value: str) -> bytes:
    if len(value) % 2 or not HEX.fullmatch(value):
        raise BadCall(f"{key} is {value[:80]!r}: it must be a cache salt, as an even number of hexadecimal digits")
    return bytes.fromhex(value)
