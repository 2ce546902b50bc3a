from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from edge.tokenizing.segments import Segmenter
from tests.edge.tokenizing.samples import MAKERS, SPECIALS, sample

FRAGMENTS = [
    *SPECIALS,
    *(
        "<mask>",
        "<gap>",
        "<w>",
        "word",
        "</s><s>",
        "<|im_",
        "end|><",
        "<tool_call>",
        "</tool_call>",
        "<|im",
        "_start|>",
        "|>",
    ),
    *(
        "<",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "a",
        "the quick",
        "word ",
        "é",
        "e\u0301",
        "漢字",
        "🙂",
        "\u2581",
        "42",
        "'s",
        "\u00a0",
    ),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=24).map("".join)
WHOLE = ["no_specials", "prepended_specials"]
CUTTING = [kind for kind in MAKERS if kind not in WHOLE]


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", CUTTING)
def test_segments_tokenize_to_what_the_whole_text_tokenizes_to(kind: str) -> None:
    tokenizer = sample(kind)
    segmenter = Segmenter.of(tokenizer)
    assert segmenter is not None

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        segments = segmenter.split(text, min_chars=1)
        assert "".join(segments) == text
        assert [token for segment in segments for token in whole(tokenizer, segment)] == whole(tokenizer, text)

    check()


@pytest.mark.parametrize("kind", CUTTING)
def test_appending_to_a_text_changes_only_its_last_segment(kind: str) -> None:
    segmenter = Segmenter.of(sample(kind))
    assert segmenter is not None

    @settings(max_examples=100, deadline=None)
    @given(TEXTS, TEXTS, st.integers(1, 12))
    def check(text: str, more: str, min_chars: int) -> None:
        closed = segmenter.split(text + "<s>x", min_chars)[:-1]
        assert segmenter.split(text + "<s>x" + more, min_chars)[: len(closed)] == closed

    check()


def test_a_cut_is_made_before_every_chat_token() -> None:
    segmenter = Segmenter.of(sample("byte_level_bpe"))
    assert segmenter is not None

    assert segmenter.split("a<|im_start|>b<|im_end|>\n<|im_start|>", min_chars=1) == [
        "a",
        "<|im_start|>b",
        "<|im_end|>\n",
        "<|im_start|>",
    ]


def test_segments_but_the_last_are_at_least_the_asked_length() -> None:
    segmenter = Segmenter.of(sample("byte_level_bpe"))
    assert segmenter is not None

    assert segmenter.split("<s>" * 7, min_chars=6) == ["<s><s>", "<s><s>", "<s><s>", "<s>"]


@pytest.mark.parametrize("kind", WHOLE)
def test_a_tokenizer_that_leaves_no_exact_cut_has_no_segmenter(kind: str) -> None:
    assert Segmenter.of(sample(kind)) is None


def test_a_cut_that_is_not_exact_is_found_out_by_the_trial() -> None:
    tokens = ["<s>", "<mask>"]

    assert Segmenter([tokens], cuts=["<s>"]).agrees_with(sample("greedy_specials"))
    assert not Segmenter([tokens], cuts=tokens).agrees_with(sample("greedy_specials"))


def test_a_token_that_begins_like_a_longer_one_is_found_too() -> None:
    segmenter = Segmenter([["<a", "<a>", "<ab>"]], cuts=["<a", "<a>"])

    assert segmenter.split("<ax<a><ab>x<a", min_chars=1) == ["<ax", "<a><ab>x", "<a"]


def test_no_cut_is_made_where_a_longer_token_begins_earlier() -> None:
    segmenter = Segmenter.of(sample("greedy_specials"))
    assert segmenter is not None

    assert segmenter.split("a</s><s>b<s>", min_chars=1) == ["a", "</s><s>b", "<s>"]


def test_tokens_that_take_white_space_from_their_left_are_no_cut() -> None:
    tokenizer = Tokenizer.from_str(sample("no_specials").to_str())
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])

    assert Segmenter.of(tokenizer) is None
