"""Limits of tenants over the wire, as OpenAI's own client sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from edge.core.admission import AdmissionLimits
from edge.core.types import TenantLimits
from edge.http.limit_headers import duration
from tests.edge.http.harness import MODEL, OTHER_KEY, Script, served

PROMPT = "a" * 20
"""A token for each byte."""


def limited(**tenant: int) -> AdmissionLimits:
    return AdmissionLimits(tenant=TenantLimits(**tenant))


def complete(client: openai.OpenAI, prompt: str = PROMPT, **members: object) -> object:
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, **members)  # type: ignore[call-overload]


def limits_of(client: openai.OpenAI, **members: object) -> dict[str, str]:
    """The rate-limit headers of one answer, without their common beginning."""
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=6, **members)  # type: ignore[call-overload]
    return headers_of(raw.headers)


def headers_of(headers: object) -> dict[str, str]:
    start = "x-ratelimit-"
    return {key.removeprefix(start): value for key, value in dict(headers).items() if key.startswith(start)}  # type: ignore[call-overload]


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_tells_where_its_tenant_stands(text_folder: Path, stream: bool) -> None:
    limits = limited(requests_per_minute=60, tokens_per_minute=600)
    with served(text_folder, admission=limits) as edge, edge.openai() as ann:
        told = limits_of(ann, stream=stream)

    assert (told["limit-requests"], told["remaining-requests"]) == ("60", "59")
    assert told["limit-tokens"] == "600"
    assert 600 - 26 <= int(told["remaining-tokens"]) < 600
    assert 0.0 < seconds(told["reset-requests"]) <= 1.0
    assert 0.0 < seconds(told["reset-tokens"]) <= 2.6


def test_where_there_is_no_limit_nothing_is_told(text_folder: Path) -> None:
    with served(text_folder, admission=limited(requests_per_minute=60)) as edge, edge.openai() as ann:
        told = limits_of(ann)

    assert told.keys() == {"limit-requests", "remaining-requests", "reset-requests"}


def test_a_mistake_of_the_caller_tells_it_too_and_a_stranger_learns_nothing(text_folder: Path) -> None:
    limits = limited(requests_per_minute=60)
    with served(text_folder, admission=limits) as edge, edge.openai() as ann, edge.openai("kr-wrong") as stranger:
        with pytest.raises(openai.NotFoundError) as mistake:
            ann.completions.create(model="none", prompt="x")
        with pytest.raises(openai.AuthenticationError) as refused:
            complete(stranger)

    assert headers_of(mistake.value.response.headers)["remaining-requests"] == "59"
    assert headers_of(refused.value.response.headers) == {}


def test_a_refused_caller_that_waits_as_it_is_told_is_served_by_its_own_librarys_retry(text_folder: Path) -> None:
    with served(text_folder, admission=limited(requests_per_minute=60)) as edge, edge.openai() as ann:
        with pytest.raises(openai.RateLimitError) as refused:
            complete_until_refused(ann)
        began_s = time.monotonic()
        complete(ann.with_options(max_retries=1))

    assert time.monotonic() - began_s > 0.5, "the library waited"
    assert refused.value.response.headers["retry-after"] == "1"
    assert headers_of(refused.value.response.headers)["remaining-requests"] == "0"


def complete_until_refused(client: openai.OpenAI) -> None:
    for _ in range(600):
        complete(client)


def test_a_prompt_whose_tokens_are_not_left_is_refused_and_one_that_never_fits_is_a_mistake(text_folder: Path) -> None:
    limits = limited(tokens_per_minute=100)
    with served(text_folder, admission=limits) as edge, edge.openai() as ann, edge.openai(OTHER_KEY) as bob:
        complete(ann, "a" * 70)
        with pytest.raises(openai.RateLimitError, match="the prompt has 90") as refused:
            complete(ann, "a" * 90)
        with pytest.raises(openai.BadRequestError, match="never served"):
            complete(ann, "a" * 101)
        complete(bob, "a" * 90)
        metrics = edge.admin("/metrics").text

    # 76 were used, and 66 must come back: 40 s.
    assert 30 <= int(refused.value.response.headers["retry-after"]) <= 40
    assert 'kinroute_edge_limited_total{limit="tenant_tokens_per_minute"} 1.0' in metrics
    assert 'kinroute_edge_limited_total{limit="tenant_prompt"} 1.0' in metrics


def test_generated_tokens_count_while_the_answer_is_made(text_folder: Path) -> None:
    with served(text_folder, admission=limited(tokens_per_minute=600)) as edge, edge.openai() as ann:
        edge.worker.answer = lambda order: Script("b" * 400, step_s=0.01) if order.stops.max_tokens > 6 else Script()
        with ann.completions.create(model=MODEL, prompt="a", max_tokens=400, stream=True) as stream:
            for _ in zip(range(50), stream, strict=False):
                pass
            told = limits_of(ann)

    assert int(told["remaining-tokens"]) < 600 - 20


def test_one_request_at_a_time_too_many_is_refused_and_a_flood_leaves_others_alone(text_folder: Path) -> None:
    hold = threading.Event()
    limits = limited(requests=3)
    with served(text_folder, admission=limits) as edge, edge.openai() as ann, edge.openai(OTHER_KEY) as bob:
        edge.worker.answer = lambda order: Script(hold=hold) if order.tenant == "acme" else Script()
        statuses: list[int] = []
        flood = [threading.Thread(target=flood_with, args=(ann, statuses)) for _ in range(8)]
        for thread in flood:
            thread.start()
        until(lambda: len(statuses) == 5)

        complete(bob)

        assert statuses == [429] * 5
        hold.set()
        for thread in flood:
            thread.join(10.0)
        assert statuses == [429] * 5 + [200] * 3
        assert edge.settled_leaks()["requests"] == 0


def test_workers_hear_whose_turn_it_is_and_no_name(text_folder: Path) -> None:
    with served(text_folder) as edge, edge.openai() as ann, edge.openai(OTHER_KEY) as bob:
        for client in (ann, ann, bob):
            complete(client)
        first, again, other = (order.tenant_tag for order in edge.worker.orders)

    assert first == again != other
    assert len(first) == 8


def flood_with(client: openai.OpenAI, statuses: list[int]) -> None:
    try:
        complete(client)
    except openai.RateLimitError as error:
        assert error.response.headers["retry-after"] == "1"  # noqa: PT017
        statuses.append(429)
    else:
        statuses.append(200)


def until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "0s"),
        (0.0004, "0s"),
        (0.012, "12ms"),
        (0.9996, "1s"),
        (1.5, "1.5s"),
        (59.9996, "1m0s"),
        (72.25, "1m12.25s"),
        (360.0, "6m0s"),
        (7384.0, "2h3m4s"),
    ],
)
def test_times_are_written_as_openai_writes_them(time_s: float, text: str) -> None:
    assert duration(time_s) == text


def seconds(text: str) -> float:
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text.removesuffix("s"))
