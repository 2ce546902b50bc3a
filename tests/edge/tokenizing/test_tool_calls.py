from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.tokenizing.tool_calls import (
    ContentDelta,
    ToolCallArguments,
    ToolCallStart,
    ToolDelta,
    ToolFormat,
    detect_format,
    make_parser,
)
from tests.edge.tokenizing.samples import CHATML, HERMES

NAMES = ["read", "write"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[]<>;\né', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"}', max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text("ab", max_size=2), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS, st.booleans()), min_size=1, max_size=3)
FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "<|python_tag|>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ":",
        ",",
        ";",
        " ",
        "\n",
    ),
    *(
        '{"name": "read"',
        ', "arguments": {"a": 1}',
        ', "parameters": ',
        '"name": "read", ',
        '"other"',
        "1",
        "null",
        "text",
    ),
]
BROKEN = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
SIZES = st.lists(st.integers(0, 9), max_size=30)


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    chunks = []
    for size in sizes:
        chunks.append(text[:size])
        text = text[size:]
    return [*chunks, text]


def deltas_of(tool_format: ToolFormat, chunks: list[str]) -> list[ToolDelta]:
    ids = itertools.count()
    parser = make_parser(tool_format, NAMES, lambda: f"call_{next(ids)}")
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)] + parser.finish()
    assert parser.calls == sum(isinstance(delta, ToolCallStart) for delta in deltas)
    return deltas


def parsed(tool_format: ToolFormat, chunks: list[str]) -> list[str | tuple[str, str, str]]:
    """Contents and calls (id, name, arguments) in order, neighbouring contents put together."""
    result: list[str | tuple[str, str, str]] = []
    calls: dict[int, int] = {}
    for delta in deltas_of(tool_format, chunks):
        match delta:
            case ContentDelta(text):
                if result and isinstance(result[-1], str):
                    result[-1] += text
                else:
                    result.append(text)
            case ToolCallStart(index, call_id, name):
                assert index == len(calls)
                calls[index] = len(result)
                result.append((call_id, name, ""))
            case ToolCallArguments(index, text):
                call = result[calls[index]]
                assert isinstance(call, tuple)
                result[calls[index]] = (call[0], call[1], call[2] + text)
    return result


def hermes_call(name: str, arguments: object, name_first: bool = True) -> str:
    pairs = [("name", name), ("arguments", arguments)]
    return f"<tool_call>\n{json.dumps(dict(pairs if name_first else pairs[::-1]))}\n</tool_call>"


def llama_call(name: str, arguments: object, name_first: bool = True) -> str:
    pairs = [("name", name), ("parameters", arguments)]
    return json.dumps(dict(pairs if name_first else pairs[::-1]))


@settings(max_examples=300, deadline=None)
@given(st.text("ab<\n {", max_size=8), CALLS, SIZES)
def test_hermes_calls_come_out_as_they_were_written_after_the_text_before_them(
    before: str, calls: list[tuple[str, dict[str, object], bool]], sizes: list[int]
) -> None:
    answer = before + "\n".join(hermes_call(*call) for call in calls)

    got = parsed(ToolFormat.HERMES, cut(answer, sizes))

    content = before.rstrip()
    assert got == [content] * bool(content) + [
        (f"call_{at}", name, json.dumps(arguments)) for at, (name, arguments, _) in enumerate(calls)
    ]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["", "\n", "<|python_tag|>", " <|python_tag|>\n"]), CALLS, SIZES)
def test_llama3_calls_come_out_as_they_were_written(
    before: str, calls: list[tuple[str, dict[str, object], bool]], sizes: list[int]
) -> None:
    answer = before + "; ".join(llama_call(*call) for call in calls)

    assert parsed(ToolFormat.LLAMA3, cut(answer, sizes)) == [
        (f"call_{at}", name, json.dumps(arguments)) for at, (name, arguments, _) in enumerate(calls)
    ]


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_however_an_answer_is_cut_it_means_the_same(tool_format: ToolFormat) -> None:
    @settings(max_examples=1000, deadline=None)
    @given(BROKEN, SIZES)
    def check(answer: str, sizes: list[int]) -> None:
        assert parsed(tool_format, cut(answer, sizes)) == parsed(tool_format, [answer])

    check()


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_an_answer_without_a_call_comes_out_whole(tool_format: ToolFormat) -> None:
    @settings(max_examples=1000, deadline=None)
    @given(BROKEN, SIZES)
    def check(answer: str, sizes: list[int]) -> None:
        deltas = deltas_of(tool_format, cut(answer, sizes))
        if not any(isinstance(delta, ToolCallStart) for delta in deltas):
            assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == answer

    check()


def test_arguments_stream_while_they_are_written() -> None:
    parser = make_parser(ToolFormat.HERMES, NAMES, lambda: "call_0")

    assert parser.push('<tool_call>{"name": "read", ') == []
    assert parser.push('"arguments": {"pa') == [ToolCallStart(0, "call_0", "read"), ToolCallArguments(0, '{"pa')]
    assert parser.push('th": "a"}') == [ToolCallArguments(0, 'th": "a"}')]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []


def test_text_is_not_held_back_where_no_call_can_begin() -> None:
    parser = make_parser(ToolFormat.HERMES, NAMES)

    assert parser.push("a < b, c") == [ContentDelta("a < b, c")]
    assert parser.push(" <") == []
    assert parser.push("b>") == [ContentDelta(" <b>")]


def test_a_call_cut_off_by_the_token_limit_keeps_the_arguments_it_has() -> None:
    got = parsed(ToolFormat.HERMES, ['<tool_call>{"name": "read", "arguments": {"path": "a'])

    assert got == [("call_0", "read", '{"path": "a')]


def test_a_call_that_breaks_after_it_began_leaves_the_rest_as_content() -> None:
    got = parsed(ToolFormat.HERMES, ['<tool_call>{"name": "read", "arguments": {"a": 1], "b": 2}}</tool_call> done'])

    assert got == [("call_0", "read", '{"a": 1'), '], "b": 2}} done']


def test_a_llama3_call_that_breaks_after_it_began_leaves_the_rest_as_content() -> None:
    got = parsed(ToolFormat.LLAMA3, ['{"name": "read", "parameters": {"a": 1}, oops}'])

    assert got == [("call_0", "read", '{"a": 1}'), "oops}"]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert parsed(ToolFormat.HERMES, ['<tool_call>{"name": "read"}</tool_call>']) == [("call_0", "read", "{}")]
    assert parsed(ToolFormat.HERMES, ['<tool_call>{"name": "read", "arguments": null}']) == [("call_0", "read", "{}")]


def test_arguments_written_as_a_string_are_what_the_string_holds() -> None:
    answer = hermes_call("read", '{"path": "a"}')

    assert parsed(ToolFormat.HERMES, [answer]) == [("call_0", "read", '{"path": "a"}')]


def test_an_answer_that_is_no_json_streams_at_once_in_llama3s_form() -> None:
    parser = make_parser(ToolFormat.LLAMA3, NAMES)

    assert parser.push("Hello") == [ContentDelta("Hello")]
    assert parser.push(" {") == [ContentDelta(" {")]


def test_json_that_names_no_tool_of_the_request_is_llama3s_answer_not_a_call() -> None:
    answer = llama_call("Paris", {"country": "France"})

    assert parsed(ToolFormat.LLAMA3, [answer]) == [answer]


def test_a_hermes_call_of_an_unknown_tool_is_a_call_for_the_caller_to_judge() -> None:
    assert parsed(ToolFormat.HERMES, [hermes_call("erase", {})]) == [("call_0", "erase", "{}")]


def test_text_after_a_llama3_call_is_content() -> None:
    answer = llama_call("read", {}) + "\nDone."

    assert parsed(ToolFormat.LLAMA3, [answer]) == [("call_0", "read", "{}"), "\nDone."]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, ToolFormat.HERMES),
        ("{{ '<|python_tag|>' }}", ToolFormat.LLAMA3),
        ('Environment: ipython {"name": function name, "parameters": ...}', ToolFormat.LLAMA3),
        ("<tool_call>\n<function=read>", None),
        (CHATML, None),
    ],
)
def test_the_form_of_calls_is_read_off_the_template(template: str, expected: ToolFormat | None) -> None:
    assert detect_format(template) is expected
