"""Bodies with many values are parsed in turns, and everybody else is served in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import orjson
import pytest

from edge.core.errors import Code, EdgeError
from edge.http.body import BodyParser, parse_object

LARGE = json.dumps({"messages": [{"role": "user", "content": "x"}] * 60_000}).encode()


@pytest.fixture
def parser() -> Iterator[BodyParser]:
    parser = BodyParser()
    yield parser
    parser.close()


@pytest.mark.anyio
async def test_a_body_is_the_same_object_whichever_way_it_is_parsed(parser: BodyParser) -> None:
    assert await parser.parse("acme", LARGE) == parse_object(LARGE) == orjson.loads(LARGE)


@pytest.mark.anyio
async def test_a_large_body_that_is_wrong_is_refused_as_a_small_one(parser: BodyParser) -> None:
    for wrong in (LARGE[:-1], b"[" + LARGE + b"]", b"{" + b"[" * 60_000):
        with pytest.raises(EdgeError) as refused:
            await parser.parse("acme", wrong)
        assert refused.value.code is Code.INVALID


@pytest.mark.anyio
async def test_one_that_sends_many_waits_behind_itself(parser: BodyParser) -> None:
    done: list[str] = []

    async def parse(tenant: str) -> None:
        await parser.parse(tenant, LARGE)
        done.append(tenant)

    async with asyncio.TaskGroup() as tasks:
        for tenant in ["evil"] * 6 + ["acme"]:
            tasks.create_task(parse(tenant))
            await asyncio.sleep(0)

    assert "acme" in done[:3]


@pytest.mark.anyio
async def test_too_many_of_one_tenant_are_refused_and_anothers_is_taken() -> None:
    parser = BodyParser(max_waiting_bytes=10 * len(LARGE))

    flood = await asyncio.gather(
        *(parser.parse("evil", LARGE) for _ in range(20)), parser.parse("acme", LARGE), return_exceptions=True
    )

    refused = [one for one in flood if isinstance(one, EdgeError)]
    assert {error.code for error in refused} == {Code.OVERLOADED}
    assert 8 < len(refused) < 14
    assert isinstance(flood[-1], dict), "another tenant's is taken"
    parser.close()
