"""The text of a choice: nothing is lost or sent twice, however tokens arrive and whenever it is taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.http.answer import AnswerText, merged
from edge.tokenizing.detokenizer import ByteLevelDetokenizer
from edge.tokenizing.hermes import HermesParser
from edge.tokenizing.tool_calls import ContentDelta, ToolCallArguments, ToolCallStart

BYTES = [bytes([byte]) for byte in range(256)]


def make_text(stops: tuple[str, ...] = (), *, tools: bool = False) -> AnswerText:
    return AnswerText(ByteLevelDetokenizer(BYTES, {}), stops, HermesParser(lambda: "call_1") if tools else None)


def content(text: AnswerText) -> str:
    return "".join(delta.text for delta in text.take() if isinstance(delta, ContentDelta))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=30), st.sets(st.integers(0, 30)))
def test_all_that_is_taken_is_the_whole_answer(answer: str, sizes: list[int], taken_after: set[int]) -> None:
    text = make_text()
    data = list(answer.encode())
    told, step = "", 0
    while data:
        size = sizes[step % len(sizes)] if sizes else 1
        text.push(data[:size])
        data = data[size:]
        if step in taken_after:
            told += content(text)
            assert text.pending_chars == 0
        step += 1
    assert text.finish() is False

    assert told + content(text) == answer


def test_a_stop_string_ends_the_text_before_it() -> None:
    text = make_text(("END",))

    assert text.push(b"one E") is False
    assert content(text) == "one ", "what may begin the stop string waits"
    assert text.push(b"ND two") is True
    assert content(text) == ""


def test_what_waited_for_a_stop_string_comes_out_at_the_end() -> None:
    text = make_text(("END",))
    text.push(b"one EN")

    assert text.finish() is False
    assert content(text) == "one EN"


def test_a_stop_string_that_had_to_wait_for_a_longer_one_still_ends_the_answer() -> None:
    text = make_text(("xbc!", "c"))
    assert text.push(b"xbc") is False

    assert text.finish() is True
    assert content(text) == "xb"


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    text = make_text()
    text.push(b"a\xc3")
    assert content(text) == "a"

    text.finish()
    assert content(text) == "\ufffd"


def test_a_tool_call_that_a_stop_string_cuts_off_is_still_ended() -> None:
    text = make_text(("STOP",), tools=True)

    assert text.push(b'<tool_call>{"name": "f", "arguments": {"a": "STOP') is True
    assert text.calls_tools
    assert [type(delta) for delta in text.take()] == [ToolCallStart, ToolCallArguments]


@pytest.mark.parametrize("tools", [False, True])
def test_pending_counts_what_waits(tools: bool) -> None:
    text = make_text(tools=tools)
    text.push(b"abc")
    text.push(b"de")
    assert text.pending_chars == 5

    text.take()
    assert text.pending_chars == 0


def test_neighbours_are_merged_and_order_is_kept() -> None:
    start = ToolCallStart(0, "id", "f")

    assert merged(
        [ContentDelta("a"), ContentDelta("b"), start, ToolCallArguments(0, "{"), ToolCallArguments(0, "}")]
    ) == [ContentDelta("ab"), start, ToolCallArguments(0, "{}")]
    assert merged([ToolCallArguments(0, "x"), ToolCallArguments(1, "y")]) == [
        ToolCallArguments(0, "x"),
        ToolCallArguments(1, "y"),
    ]
