"""The text of one output: token by token in, pieces and the stop text that ends it out."""

from __future__ import annotations

from collections.abc import Sequence

from edge.tokenizing.detokenizer import Detokenizer
from edge.tokenizing.stops import StopStrings


class OutputText:
    """After a stop text was found, or after `finish`, nothing may be pushed."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that may go out now, and the stop text that ends the output, if one does."""
        text = self._detokenizer.push((token_id,))
        return (text, None) if self._stops is None else self._stops.push(text)

    def finish(self) -> tuple[str, str | None]:
        """What was held back."""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text, None
        before, found = self._stops.push(text)
        if found is not None:
            return before, found
        rest, found = self._stops.finish()
        return before + rest, found
