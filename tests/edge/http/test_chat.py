"""POST /v1/chat/completions, asked by the `openai` package."""

from __future__ import annotations

from array import array
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from edge.core.types import FinishReason
from edge.legs import LegOrder
from tests.edge.http.harness import MODEL, PLAIN_TEMPLATE, Script, Served, make_text_folder, served

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def prompt_text(order: LegOrder) -> str:
    """The prompt as the harness's tokenizer reads it back; special tokens are left out."""
    return bytes(token for token in array("I", order.token_ids) if token < 256).decode()


def test_an_answer_has_text_usage_and_a_finish_reason(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("Grüße!", cached_tokens=4)

    answer = edge.openai().chat.completions.create(model=MODEL, messages=HI)

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Grüße!", "stop")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(edge.worker.orders[0].token_ids) // 4
    assert answer.usage.completion_tokens == len("Grüße!".encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_an_alias_is_served_under_the_models_own_name(edge: Served) -> None:
    assert edge.openai().chat.completions.create(model="small", messages=HI).model == MODEL


def test_messages_reach_the_worker_as_the_template_writes_them(edge: Served) -> None:
    edge.openai().chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )

    assert prompt_text(edge.worker.orders[0]) == "system\nBe kind.\nuser\na\nb\nassistant\n"


def test_every_sampling_option_reaches_the_worker(edge: Served) -> None:
    edge.openai().chat.completions.create(
        model=MODEL,
        messages=HI,
        temperature=0.5,
        top_p=0.25,
        frequency_penalty=-1,
        presence_penalty=2,
        seed=7,
        max_completion_tokens=9,
        extra_body={
            "top_k": 3,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [65],
            "ignore_eos": True,
        },
    )

    order = edge.worker.orders[0]
    sampling = order.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-1.0, 2.0)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.5, 7, None)
    assert (order.stops.max_tokens, order.stops.min_tokens) == (9, 2)
    assert (order.stops.stop_token_ids, order.stops.ignore_eos) == ((65,), True)


def test_an_answer_ends_at_the_token_limit(edge: Served) -> None:
    choice = edge.openai().chat.completions.create(model=MODEL, messages=HI, max_tokens=3).choices[0]

    assert (choice.message.content, choice.finish_reason) == ("Hel", "length")


def test_without_a_limit_an_answer_may_fill_the_context(edge: Served) -> None:
    edge.openai().chat.completions.create(model=MODEL, messages=HI)

    order = edge.worker.orders[0]
    assert order.stops.max_tokens == 512 - len(order.token_ids) // 4


def test_a_stop_string_across_tokens_ends_the_answer_and_its_turn(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("one two three" + "x" * 400, step_s=0.002)

    choice = edge.openai().chat.completions.create(model=MODEL, messages=HI, stop=["two", "zzz"]).choices[0]

    assert (choice.message.content, choice.finish_reason) == ("one ", "stop")
    assert edge.settled_leaks()["turns"] == 0
    assert edge.worker.cancelled == [edge.worker.orders[0].request_id]


def test_n_choices_have_seeds_of_their_own_and_count_the_prompt_once(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(f"answer {order.sampling.seed}")

    answer = edge.openai().chat.completions.create(model=MODEL, messages=HI, n=3, seed=5)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["answer 5", "answer 6", "answer 7"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(edge.worker.orders[0].token_ids) // 4
    assert answer.usage.completion_tokens == 3 * len("answer 5")


def test_log_probabilities_of_tokens_and_alternatives(edge: Served) -> None:
    edge.worker.answer = lambda order: Script("é")

    choice = edge.openai().chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2).choices[0]

    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.bytes for entry in choice.logprobs.content] == [[0xC3], [0xA9]]
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5, -0.5]
    assert [top.logprob for top in choice.logprobs.content[0].top_logprobs] == [-0.5, -1.5]
    assert choice.logprobs.content[0].top_logprobs[1].bytes == [0xC4]


def test_a_tool_call_in_the_answer_becomes_tool_calls(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(CALL)

    choice = edge.openai().chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER]).choices[0]

    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert '"name": "weather"' in prompt_text(edge.worker.orders[0])


@pytest.mark.parametrize(("text", "reason"), [(CALL, FinishReason.TOOL_CALLS), ("Done.", FinishReason.STOP)])
def test_the_worker_hears_whether_an_answer_called_tools(edge: Served, text: str, reason: FinishReason) -> None:
    edge.worker.answer = lambda order: Script(text)

    edge.openai().chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])

    assert edge.worker.endings[-1] is reason


def test_without_tools_a_call_is_text(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(CALL)

    choice = edge.openai().chat.completions.create(model=MODEL, messages=HI).choices[0]

    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


def test_tool_choice_none_hides_the_tools(edge: Served) -> None:
    edge.openai().chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER], tool_choice="none")

    assert "weather" not in prompt_text(edge.worker.orders[0])


def test_tools_are_refused_where_the_template_does_not_show_them(tmp_path: Path) -> None:
    with (
        served(make_text_folder(tmp_path, PLAIN_TEMPLATE)) as edge,
        pytest.raises(openai.BadRequestError, match=f"The model '{MODEL}' cannot call tools") as refused,
    ):
        edge.openai().chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])
    assert refused.value.param == "tools"


def test_a_prompt_that_fills_the_context_is_refused_with_both_lengths(edge: Served) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"maximum context length is 512 tokens.*your prompt has \d{3,} "
    ) as e:
        edge.openai().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 600}])

    assert (e.value.code, e.value.param) == ("context_length_exceeded", "messages")
    assert edge.worker.orders == []


def test_unknown_fields_are_accepted(edge: Served) -> None:
    answer = edge.openai().chat.completions.create(
        model=MODEL, messages=HI, store=False, user="u", metadata={"a": "b"}, extra_body={"who_knows": [1]}
    )

    assert answer.choices[0].message.content == "Hello!"


def test_lineage_reaches_the_worker_hashed(edge: Served) -> None:
    headers = {"X-Kinroute-Conversation-ID": "child", "X-Kinroute-Parent-ID": "mother"}
    edge.openai().chat.completions.create(model=MODEL, messages=HI, extra_headers=headers)
    edge.openai().chat.completions.create(
        model=MODEL, messages=HI, extra_headers={"X-Kinroute-Conversation-ID": "mother"}
    )

    child, mother = (order.lineage for order in edge.worker.orders)
    assert child.parent == mother.conversation
    assert str(child.family) == str(mother.conversation)
    assert "mother" not in repr(child)


def test_a_conversation_without_an_id_has_the_same_one_at_every_turn(edge: Served) -> None:
    client = edge.openai()
    client.chat.completions.create(model=MODEL, messages=HI)
    client.chat.completions.create(
        model=MODEL, messages=[*HI, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "so?"}]
    )
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "other"}])

    first, second, other = (order.lineage.conversation for order in edge.worker.orders)
    assert first == second != other


def test_a_worker_that_cancels_by_itself_is_an_error(edge: Served) -> None:
    edge.worker.answer = lambda order: Script(reason=FinishReason.CANCELLED)

    with pytest.raises(openai.APIStatusError) as failed:
        edge.openai().chat.completions.create(model=MODEL, messages=HI)
    assert failed.value.status_code == 499
