"""Text of answers: whole characters only, and no part of a stop text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import make_tokenizer
from worker.text import TextModel

TOKENIZER = make_tokenizer()
MODEL = TextModel(TOKENIZER)


def shown(text: str, *stop_texts: str) -> tuple[str, str | None]:
    """All that is shown of an answer that would be `text`, and what stopped it."""
    answer = MODEL.answer(stop_texts)
    parts = []
    for token_id in MODEL.encode(text):
        part, stop = answer.push(token_id)
        parts.append(part)
        if stop is not None:
            return "".join(parts), stop
    return "".join(parts) + answer.finish(), None


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abé✓ 𝄞", max_size=20))
def test_without_stop_texts_everything_is_shown(text: str) -> None:
    assert shown(text) == (text, None)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_an_answer_ends_where_the_first_stop_text_is_complete(text: str, stop_texts: list[str]) -> None:
    """As if the whole text were searched again after each character."""
    expected: tuple[str, str | None] = (text, None)
    for length in range(1, len(text) + 1):
        found = [(text[:length].find(stop), stop) for stop in stop_texts if stop in text[:length]]
        if found:
            at, stop = min(found)
            expected = (text[:at], stop)
            break

    assert shown(text, *stop_texts) == expected


def test_what_may_become_a_stop_text_is_held_back() -> None:
    answer = MODEL.answer(["abc"])

    assert [answer.push(token_id)[0] for token_id in MODEL.encode("xabd")] == ["x", "", "", "abd"]
