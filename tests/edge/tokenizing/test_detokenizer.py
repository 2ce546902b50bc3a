from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edge.tokenizing.detokenizer import make_detokenizer
from edge.tokenizing.vocabulary import Vocabulary
from tests.edge.tokenizing.samples import MAKERS, sample

TEXTS = st.lists(
    st.sampled_from(
        ["the quick", " brown", " fox, jumps", "\n", "  ", "漢字", "🙂", "é", "ᚠ", "<|im_end|>", "don't ", "."]
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)

BYTE_FALLBACK = ("sentencepiece_bpe", "prepended_specials")


def pushed(tokenizer: Tokenizer, ids: Iterable[int], keep: Iterable[int] = ()) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, Vocabulary(tokenizer), frozenset(keep))
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", MAKERS)
def test_the_pushes_of_a_tokenized_text_are_together_its_decoding(kind: str) -> None:
    tokenizer = sample(kind)

    @settings(max_examples=200, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)

    check()


@pytest.mark.parametrize("kind", MAKERS)
def test_the_pushes_of_any_ids_are_together_their_decoding(kind: str) -> None:
    tokenizer = sample(kind)
    size = tokenizer.get_vocab_size()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, size + 3), max_size=20))
    def check(ids: list[int]) -> None:
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        if kind in BYTE_FALLBACK and "\ufffd" in whole:
            return  # there, how many U+FFFD stand for a run of bytes depends on when they came
        assert "".join(pushed(tokenizer, ids)) == whole

    check()


@pytest.mark.parametrize("kind", ["byte_level_bpe", "sentencepiece_bpe", "wordpiece"])
def test_several_tokens_at_once_give_the_same_text(kind: str) -> None:
    tokenizer = sample(kind)
    ids = tokenizer.encode("the quick brown fox, 漢字 jumps", add_special_tokens=False).ids
    detokenizer = make_detokenizer(tokenizer, Vocabulary(tokenizer))

    text = detokenizer.push(ids[:3]) + detokenizer.push([]) + detokenizer.push(ids[3:]) + detokenizer.finish()

    assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level_bpe", "sentencepiece_bpe"])
def test_a_character_comes_out_only_when_its_last_byte_came(kind: str) -> None:
    tokenizer = sample(kind)
    ids = tokenizer.encode("🙂", add_special_tokens=False).ids
    assert len(ids) >= 4

    pushes = [push for push in pushed(tokenizer, ids) if push]

    assert "".join(pushes).strip() == "🙂"
    assert "\ufffd" not in "".join(pushes)


@pytest.mark.parametrize("kind", ["byte_level_bpe", "sentencepiece_bpe"])
def test_an_answer_that_ends_inside_a_character_ends_with_a_replacement(kind: str) -> None:
    tokenizer = sample(kind)
    ids = tokenizer.encode("a🙂", add_special_tokens=False).ids[:-1]

    *pushes, last = pushed(tokenizer, ids)

    assert "\ufffd" not in "".join(pushes)
    assert set(last) == {"\ufffd"}


@pytest.mark.parametrize("kind", ["byte_level_bpe", "sentencepiece_bpe"])
def test_special_tokens_are_left_out_unless_they_are_to_be_kept(kind: str) -> None:
    tokenizer = sample(kind)
    ids = tokenizer.encode("<|im_start|>fox<|im_end|>", add_special_tokens=False).ids

    assert "".join(pushed(tokenizer, ids)).strip() == "fox"
    assert "".join(pushed(tokenizer, ids, keep=ids[:1])).replace(" ", "") == "<|im_start|>fox"


def test_bytes_of_tokens_are_together_the_bytes_of_a_text() -> None:
    tokenizer = sample("byte_level_bpe")
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("naïve 🙂<|im_end|>", add_special_tokens=False).ids

    assert b"".join(map(vocabulary.token_bytes, ids)) == "naïve 🙂<|im_end|>".encode()


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        ("byte_level_bpe", "Ġthe", " the"),
        ("sentencepiece_bpe", "▁the", " the"),
        ("sentencepiece_bpe", "<0x41>", "A"),
        ("wordpiece", "the", " the"),
    ],
)
def test_a_token_reads_as_it_would_inside_an_answer(kind: str, token: str, text: str) -> None:
    vocabulary = Vocabulary(sample(kind))
    token_id = vocabulary.id_of(token)
    assert token_id is not None

    assert vocabulary.token_text(token_id) == text


def test_an_id_that_does_not_exist_is_no_text() -> None:
    assert Vocabulary(sample("byte_level_bpe")).token_text(10**6) == ""
    assert pushed(sample("byte_level_bpe"), [10**6]) == ["", ""]
