"""Token ids of an answer to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from edge.tokenizing.vocabulary import Vocabulary

MAX_HELD_TOKENS = 16
"""A text that ends in an incomplete character after this many tokens is not going to become a character."""


class Detokenizer(Protocol):
    """One answer's text. All that `push` and `finish` return, together, is what decoding the whole answer returns.

    Special tokens are left out. A character whose bytes have not all come is held back.
    """

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """The rest; what never became a character is U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level decoders: one look-up a token, and Python's own incremental UTF-8."""

    __slots__ = ("_bytes_of", "_decode", "_keep")

    def __init__(self, bytes_of: Sequence[bytes | None], keep: dict[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._keep = keep
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(token_ids) == 1 and 0 <= (token_id := token_ids[0]) < len(bytes_of):
            data = bytes_of[token_id] or self._keep.get(token_id, b"")
            return self._decode(data)
        size = len(bytes_of)
        known = (bytes_of[token_id] or self._keep.get(token_id, b"") for token_id in token_ids if 0 <= token_id < size)
        return self._decode(b"".join(known))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other decoder: decodes the last few tokens again, together with those after which text last came out.

    Those before are only context, for decoders that treat the first token of a text differently. Where the bytes of
    byte-fallback tokens are not UTF-8, how many U+FFFD stand for them depends on when they came.
    """

    __slots__ = ("_context", "_context_chars", "_held", "_keep", "_tokenizer", "_vocabulary")

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, keep: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._keep = keep
        self._context: list[int] = []
        self._context_chars = 0
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            if token_id in self._keep or not self._vocabulary.is_special(token_id):
                self._held.append(token_id)
                parts.append(self._take(final=False))
        return "".join(parts)

    def finish(self) -> str:
        return self._take(final=True) if self._held else ""

    def _take(self, *, final: bool) -> str:
        text = self._decode([*self._context, *self._held])
        if text.endswith("\ufffd") and not final and len(self._held) < MAX_HELD_TOKENS:
            return ""
        new = text[self._context_chars :]
        self._context, self._context_chars, self._held = self._held, len(self._decode(self._held)), []
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def make_detokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, keep: Collection[int] = ()) -> Detokenizer:
    """A detokenizer for one answer. `keep`: special tokens that belong to its text all the same."""
    if vocabulary.bytes_of is not None:
        return ByteLevelDetokenizer(
            vocabulary.bytes_of, {token_id: vocabulary.token_bytes(token_id) for token_id in keep}
        )
    return WindowDetokenizer(tokenizer, vocabulary, keep)
