"""What a caller asks for its blocks reaches the worker within what its tenant may ask, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from edge.settings import Limits
from enginelink.retention import Retention, TokenRange
from tests.edge.http.harness import MODEL, Served, served

EVERYTHING = {"kv_cache_retention_config": {"priority": 100, "duration_ms": 60_000}}


def chat(edge: Served, extra: dict[str, Any]) -> None:
    edge.openai().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1, extra_body=extra
    )


def complete(edge: Served, extra: dict[str, Any]) -> None:
    edge.openai().completions.create(model=MODEL, prompt="hi", max_tokens=1, extra_body=extra)


@pytest.mark.parametrize("ask", [chat, complete])
def test_a_caller_that_asks_for_priority_100_for_all_its_blocks_gets_the_default(edge: Served, ask: Any) -> None:
    ask(edge, EVERYTHING)

    assert edge.worker.orders[0].retention == Retention((TokenRange(0, None, 35),), decode_priority=35)


@pytest.mark.parametrize("ask", [chat, complete])
def test_what_is_within_the_tenants_bounds_is_passed_on_as_it_was_asked(edge: Served, ask: Any) -> None:
    ranges = [{"token_start": 2, "token_end": 8, "priority": 10}, {"token_start": 8, "priority": 0}]
    ask(edge, {"kv_cache_retention_config": {"token_range_retention_configs": ranges}})

    assert edge.worker.orders[0].retention == Retention((TokenRange(2, 8, 10), TokenRange(8, None, 0)))


def test_a_tenant_that_may_ask_for_more_gets_more(text_folder: Path) -> None:
    limits = Limits(tenant_max_retention_priority=80, tenant_max_retention_duration_ms=1_000)
    with served(text_folder, limits=limits) as edge:
        chat(edge, EVERYTHING)

        assert edge.worker.orders[0].retention == Retention((TokenRange(0, None, 80, 1_000),), 80, 1_000)


def test_who_asks_for_nothing_sends_nothing(edge: Served) -> None:
    chat(edge, {})

    assert edge.worker.orders[0].retention is None


@pytest.mark.parametrize("ask", [chat, complete])
def test_a_wrong_one_is_a_400_that_names_path_value_and_what_is_allowed(edge: Served, ask: Any) -> None:
    ranges = [{"token_start": 0, "priority": 101}]

    with pytest.raises(openai.BadRequestError) as refused:
        ask(edge, {"kv_cache_retention_config": {"token_range_retention_configs": ranges}})

    path = "kv_cache_retention_config.token_range_retention_configs[0].priority"
    assert refused.value.param == path
    assert f"'{path}': expected an integer from 0 to 100, but got 101" in refused.value.message
    assert not edge.worker.orders
