"""POST /v1/completions, asked by the `openai` package."""

from __future__ import annotations

from array import array

import openai
import pytest

from tests.edge.http.harness import MODEL, Script, Served


def packed(token_ids: bytes) -> bytes:
    return array("I", list(token_ids)).tobytes()


def test_a_text_is_continued(edge: Served) -> None:
    answer = edge.openai().completions.create(model=MODEL, prompt="Say", max_tokens=4)

    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hell", "length")
    assert edge.worker.orders[0].token_ids == packed(b"Say")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)


def test_sixteen_tokens_are_the_default(edge: Served) -> None:
    edge.openai().completions.create(model=MODEL, prompt="Say")

    assert edge.worker.orders[0].stops.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (["a", "bc"], [b"a", b"bc"]),
        ([97, 98, 99], [b"abc"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
    ids=["strings", "token ids", "lists of token ids"],
)
def test_a_prompt_has_four_forms(edge: Served, prompt: list[str] | list[int], prompts: list[bytes]) -> None:
    edge.openai().completions.create(model=MODEL, prompt=prompt, max_tokens=1)

    assert [order.token_ids for order in edge.worker.orders] == [packed(ids) for ids in prompts]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(order.token_ids[::4] + b"%d" % (order.sampling.seed or 0))

    answer = edge.openai().completions.create(model=MODEL, prompt=["a", "bb"], n=2, seed=0)

    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a0"), (1, "a1"), (2, "bb2"), (3, "bb3")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_streamed_text_is_the_whole_text(edge: Served) -> None:
    chunks = list(
        edge.openai().completions.create(
            model=MODEL, prompt="a", stream=True, stream_options={"include_usage": True}, stop="!"
        )
    )

    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("Hello!")


def test_log_probabilities_tell_where_each_tokens_text_begins(edge: Served) -> None:
    choice = edge.openai().completions.create(model=MODEL, prompt="a", max_tokens=3, logprobs=2).choices[0]

    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["H", "e", "l"]
    assert choice.logprobs.token_logprobs == [-0.5] * 3
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"H": -0.5, "I": -1.5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 4}, "best_of"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_field_is_refused_by_name(edge: Served, fields: dict[str, object], param: str) -> None:
    with edge.client() as client:
        response = client.post("/v1/completions", json={"model": MODEL, **fields})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert edge.worker.orders == []


def test_a_lone_surrogate_is_refused(edge: Served) -> None:
    with edge.client() as client:
        response = client.post(
            "/v1/completions",
            content=b'{"model": "tiny", "prompt": "\\ud800"}',
            headers={"content-type": "application/json"},
        )

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_named(edge: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist") as refused:
        edge.openai().completions.create(model="gpt-9", prompt="a")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
