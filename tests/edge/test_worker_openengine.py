"""Engines that answer in OpenEngine, and not as they should."""

from __future__ import annotations

import pytest

from edge.core.errors import Code
from edge.openengine_wire import first_token_of
from openengine.v1 import kv_pb2
from tests.edge.fakes import Heard, fake_worker, linked_driver, make_turn


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["garble", "empty-reference"])
async def test_an_answer_without_an_end_or_with_an_empty_reference_is_an_error_and_the_edge_goes_on(fault: str) -> None:
    with (
        fake_worker("--fault", fault, "--fault-after", "1") as (context, _),
        fake_worker("--fault", fault, "--fault-after", "1") as (generation, _),
    ):
        async with linked_driver([context], [generation], protocol="openengine") as driver:
            well, badly = Heard(), Heard()
            driver.start(make_turn(), well)
            await well.wait()
            assert well.error is None
            driver.start(make_turn(), badly)
            await badly.wait()
            assert badly.error is not None
            assert badly.error.code is Code.WORKER_FAILED
            assert driver.model_ready


@pytest.mark.parametrize(
    ("values", "token"),
    [([5], 5), ([0], 0), ([], None), ([5, 6], None), (["5"], None), ([5.5], None), ([-1], None), ([2**32], None)],
)
def test_the_first_token_is_read_only_where_a_reference_holds_exactly_one(
    values: list[float | str], token: int | None
) -> None:
    session = kv_pb2.KvSessionRef()
    session.attributes_struct.update({"first_gen_tokens": values})
    assert first_token_of(session) == token


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_first_token_that_is_no_number_is_none(value: float) -> None:
    session = kv_pb2.KvSessionRef()
    session.attributes_struct.update({"first_gen_tokens": [value]})
    assert first_token_of(session) is None


def test_a_reference_without_attributes_has_no_first_token() -> None:
    assert first_token_of(kv_pb2.KvSessionRef()) is None
