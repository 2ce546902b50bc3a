"""Text for callers of this worker's own OpenEngine server: prompts in, answers out, stop texts.

The edge does all this itself and never asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextModel:
    """A model folder's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> TextModel | None:
        """None where the folder has no tokenizer.json: then only token ids are served."""
        file = folder / "tokenizer.json"
        return cls(Tokenizer.from_file(str(file))) if file.is_file() else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def token(self, token_id: int) -> str:
        """One token on its own; bytes that are no whole character show as U+FFFD."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def answer(self, stop_texts: Iterable[str]) -> AnswerText:
        return AnswerText(self._tokenizer, tuple(stop_texts))


class AnswerText:
    """The text of one growing answer, held back where it may become a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop_texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop_texts = stop_texts
        self._held = ""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """What may be shown now, and the stop text that ends the answer, if one does; nothing follows it."""
        held = self._held + (self._stream.step(self._tokenizer, token_id) or "")
        found = min(((at, text) for text in self._stop_texts if (at := held.find(text)) >= 0), default=None)
        if found is not None:
            return held[: found[0]], found[1]
        keep = max((_overlap(held, text) for text in self._stop_texts), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def finish(self) -> str:
        """What was held back in vain."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`, short of all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
