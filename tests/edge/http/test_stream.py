"""Streamed answers: what arrives, in which order, and how a stream ends."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from edge.core.errors import Code, EdgeError
from edge.settings import Limits
from tests.edge.http.harness import MODEL, Script, Served, served
from tests.edge.http.test_chat import CALL, HI, WEATHER

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


def events_of(raw: str) -> list[Any]:
    """The data of every event; [DONE] as it stands. Every line is data, a comment or blank."""
    events = []
    for line in raw.split("\n"):
        assert line == "" or line.startswith((": ", "data: ")), line
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def test_the_role_comes_first_then_text_then_the_finish_reason(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("Grüße!", step_s=0.01)

    with edge.client() as client:
        response = client.post("/v1/chat/completions", json=BODY)

    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Grüße!"
    assert len(deltas) > 4, "text comes as it is made"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_is_a_last_chunk_of_no_choice(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(cached_tokens=3)

    chunks = list(
        edge.openai().chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )

    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len("Hello!")
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 3


def test_choices_are_merged_into_one_stream(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(f"answer {order.sampling.seed}")

    texts: dict[int, str] = {}
    reasons = []
    for chunk in edge.openai().chat.completions.create(model=MODEL, messages=HI, n=3, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []

    assert texts == {0: "answer 1", 1: "answer 2", 2: "answer 3"}
    assert reasons == ["stop"] * 3


def test_tool_calls_are_streamed(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(CALL)

    content, name, arguments, reasons, pieces = "", "", "", [], 0
    for chunk in edge.openai().chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER], stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            pieces += 1

    assert (content, name, arguments, reasons) == ("Let me look.", "weather", '{"city": "Oslo"}', ["tool_calls"])
    assert pieces > 2, "arguments come as they are made"


def test_log_probabilities_are_streamed_with_every_token(edge: Served) -> None:
    stream = edge.openai().chat.completions.create(model=MODEL, messages=HI, stream=True, logprobs=True)

    tokens = [
        entry.token
        for chunk in stream
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert tokens == list("Hello!")


def test_an_answer_without_a_token_is_still_a_whole_stream(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("")

    chunks = list(edge.openai().chat.completions.create(model=MODEL, messages=HI, stream=True))

    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_failure_before_the_first_token_has_a_status(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("", error=EdgeError(Code.OVERLOADED, "full", retry_after_s=2.5))

    with edge.client() as client:
        response = client.post("/v1/chat/completions", json=BODY)

    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["message"] == "full"


def test_a_failure_after_the_first_token_is_the_streams_last_event(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("Hel", error=EdgeError(Code.WORKER_FAILED, "it died"))

    with edge.client() as client:
        response = client.post("/v1/chat/completions", json=BODY)

    assert response.status_code == 200
    *chunks, last = events_of(response.text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hel"
    assert last == {"error": {"message": "it died", "type": "server_error", "param": None, "code": "worker_failed"}}
    with pytest.raises(openai.APIError, match="it died"):
        list(edge.openai().chat.completions.create(model=MODEL, messages=HI, stream=True))


def test_a_failed_choice_ends_the_others(edge: Served) -> None:
    def answer(order: Any) -> Script:
        error = EdgeError(Code.WORKER_FAILED, "it died")
        return Script("ab", error=error) if order.sampling.seed == 1 else Script("x" * 400, step_s=0.005)

    edge.worker.answer = answer
    with edge.client() as client:
        response = client.post("/v1/chat/completions", json={**BODY, "n": 2, "seed": 1})

    assert events_of(response.text)[-1]["error"]["code"] == "worker_failed"
    assert edge.settled_leaks()["turns"] == 0
    assert len(edge.worker.cancelled) == 1


def test_comments_keep_a_stream_alive_while_its_prompt_waits(text_folder: Path) -> None:
    hold = threading.Event()
    with served(text_folder, limits=Limits(stream_comment_s=0.05)) as edge, edge.client() as client:
        edge.worker.answer = lambda order: Script(hold=hold)
        with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
            lines = response.iter_lines()
            assert response.status_code == 200, "the status line did not wait for the first token"
            comments = [next(lines) for _ in range(4)]
            hold.set()
            rest = "\n".join(lines)

    assert comments == [": keep-alive", ""] * 2
    assert events_of(rest)[-1] == "[DONE]"


def test_a_failure_after_a_comment_is_an_event(text_folder: Path) -> None:
    hold = threading.Event()
    with served(text_folder, limits=Limits(stream_comment_s=0.05)) as edge, edge.client() as client:
        edge.worker.answer = lambda order: Script("", error=EdgeError(Code.WORKER_FAILED, "it died"), hold=hold)
        with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            hold.set()
            rest = "\n".join(lines)

    assert events_of(rest)[-1]["error"]["message"] == "it died"


def test_the_receipt_and_the_request_id_are_in_the_headers(edge: Served) -> None:
    with edge.client() as client:
        response = client.post("/v1/chat/completions", json=BODY, headers={"X-Request-ID": "mine-1"})

    assert response.headers["x-request-id"] == "mine-1"
    receipt = json.loads(response.headers["x-kinroute-receipt"])
    assert receipt == {
        "context_worker": "127.0.0.1:1",
        "generation_worker": "127.0.0.1:1",
        "attempts": 1,
        "conversation": edge.worker.orders[0].lineage.conversation,
    }
