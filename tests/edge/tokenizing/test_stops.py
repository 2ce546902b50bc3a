from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.tokenizing.stops import StopStrings

STOPS = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=16)


def cut(text: str, sizes: list[int]) -> list[str]:
    chunks = []
    for size in sizes:
        chunks.append(text[:size])
        text = text[size:]
    return [*chunks, text]


def stream(stops: list[str], chunks: list[str]) -> tuple[list[str], str | None]:
    """What goes out, push by push, and the stop string that ended it."""
    machine = StopStrings(stops)
    sent = []
    for chunk in chunks:
        text, matched = machine.push(chunk)
        sent.append(text)
        if matched is not None:
            return sent, matched
    text, matched = machine.finish()
    return [*sent, text], matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    at, _, stop = min(found)
    return text[:at], stop


@settings(max_examples=1000, deadline=None)
@given(STOPS, st.text("abc<|", max_size=40), st.lists(st.integers(0, 6), max_size=20))
def test_the_answer_ends_where_the_first_stop_string_begins_however_it_is_cut(
    stops: list[str], text: str, sizes: list[int]
) -> None:
    sent, matched = stream(stops, cut(text, sizes))

    assert ("".join(sent), matched) == naive(stops, text)


@given(STOPS, st.text("abc<|", max_size=40))
def test_text_waits_only_while_a_stop_string_may_still_begin_in_it(stops: list[str], text: str) -> None:
    machine = StopStrings(stops)
    sent, matched = machine.push(text)

    held = text[len(sent) :]
    if matched is None and held:
        whole_already = any(held.startswith(stop) for stop in stops)
        assert whole_already or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_tokens_is_never_sent_in_part() -> None:
    assert stream(["END"], ["the ", "E", "N", "D", "more"]) == (["the ", "", "", ""], "END")


def test_text_that_only_began_like_a_stop_string_comes_out() -> None:
    assert stream(["END"], ["the ", "E", "N", "E", "n"]) == (["the ", "", "", "EN", "En", ""], None)


def test_a_stop_string_inside_a_longer_one_waits_for_it() -> None:
    assert stream(["abcd", "bc"], ["abc"]) == (["", "a"], "bc")
    assert stream(["abcd", "bc"], ["abc", "d"]) == (["", ""], "abcd")
    assert stream(["abcd", "bc"], ["abc", "e"]) == (["", "a"], "bc")


def test_without_stop_strings_everything_passes() -> None:
    assert stream([], ["a", "b"]) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_a_mistake_of_the_program() -> None:
    with pytest.raises(AssertionError):
        StopStrings([""])
