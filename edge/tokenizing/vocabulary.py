"""What each token id stands for, in text and in bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The tokens of one tokenizer, as its decoder reads them.

    `bytes_of` is set where the decoder is byte-level, so that an answer's bytes are its tokens' bytes, one after the
    other: [token id] -> bytes, None for a special token or an id that does not exist.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._special_text = {token.content for token in self._added.values() if token.special}
        self._decoder = _decoder_kind(tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.bytes_of: list[bytes | None] | None = None
        if self._decoder == "ByteLevel":
            self.bytes_of = [None] * self.size
            for text, token_id in vocabulary.items():
                if text not in self._special_text:
                    self.bytes_of[token_id] = byte_level_bytes(text)

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves this token out; ids that do not exist are left out too."""
        text = self._tokenizer.id_to_token(token_id)
        return text is None or text in self._special_text

    def id_of(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, inside an answer (a word's leading space included); special tokens as they
        are written. May be part of a character."""
        text = self._tokenizer.id_to_token(token_id)
        if text is None:
            return b""
        if token_id in self._added:
            return text.encode()
        if self._decoder == "ByteLevel":
            return byte_level_bytes(text)
        if self._decoder == "WordPiece":
            return text.removeprefix("##").encode() if text.startswith("##") else f" {text}".encode()
        if (byte := BYTE_TOKEN.fullmatch(text)) is not None:
            return bytes.fromhex(byte[1])
        return text.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """The token as text, for display: bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those texts that are one added token."""
        ids = (self.id_of(text) for text in texts)
        return frozenset(token_id for token_id in ids if token_id is not None and token_id in self._added)


def _decoder_kind(tokenizer: Tokenizer) -> str:
    """The decoder's type, of a sequence of one the type of that one; empty if there is none."""
    if tokenizer.decoder is None:
        return ""
    settings: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    while settings["type"] == "Sequence" and len(settings["decoders"]) == 1:
        (settings,) = settings["decoders"]
    return str(settings["type"])


def byte_level_bytes(text: str) -> bytes:
    """The bytes that a byte-level token's characters stand for; a text with any other character stands for itself."""
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in text])
    except KeyError:
        return text.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
