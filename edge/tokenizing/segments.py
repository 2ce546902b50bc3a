"""Where a text may be cut so that its pieces tokenize to what the whole tokenizes to.

The `tokenizers` library first finds the added tokens that are not normalized, in the whole text, leftmost and longest;
what lies between them is normalized, searched for the other added tokens, pre-tokenized and given to the model, each
stretch for itself. So a text may be cut where an added token of the first kind begins, provided the token takes no
white space from its left (`lstrip`), does not depend on its neighbours (`single_word`), and white space that an earlier
token takes (`rstrip`) ends before it. Where there is no normalizer, tokens of the second kind will do as well. Every
piece but the first then begins with an added token, so rules for the first stretch of a text (Metaspace's
`prepend_scheme: first`) still see only the first.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

MIN_SEGMENT_CHARS = 512
"""Segments end at the first cut after this many characters: fewer, larger entries for the cache."""

MAX_TRIED_CUTS = 24
TRIAL_TEXTS = ("", " ", "a", " b\n", "\n\n", "Ωmega  é", "don't 42", "\u2581x", "<", " 漢字 ", "\t🙂")


class Segmenter:
    """Cuts texts for one tokenizer. Appending to a text changes no segment but its last."""

    def __init__(self, passes: Sequence[Collection[str]], cuts: Iterable[str]) -> None:
        """`passes`: the tokens the library looks for, first in the text and then between those that it found; `cuts`:
        the tokens among them before which a cut is exact."""
        self._find, *between = [re.compile(_trie_pattern(tokens)) for tokens in passes if tokens]
        self._find_between = between[0] if between else None
        self._cuts = frozenset(cuts)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Segmenter | None:
        """The segmenter of a tokenizer; None if no exact cut is known, or if the tokenizer fails a trial of it."""
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        found = [token for token in added if not token.normalized]
        between = [token for token in added if token.normalized]
        if _normalizes(tokenizer) or any(token.lstrip or token.rstrip for token in found):
            between = []
        cuts = [token.content for token in (*found, *between) if _is_cut(token)]
        if not cuts:
            return None
        segmenter = cls([[token.content for token in tokens] for tokens in (found, between)], cuts)
        return segmenter if segmenter.agrees_with(tokenizer) else None

    def split(self, text: str, min_chars: int = MIN_SEGMENT_CHARS) -> list[str]:
        """The segments of `text`, in order; together they are the text. At least one, none shorter than `min_chars`
        but the last."""
        segments = []
        begin = 0
        for at in self._places(text):
            if at - begin >= min_chars:
                segments.append(text[begin:at])
                begin = at
        segments.append(text[begin:])
        return segments

    def agrees_with(self, tokenizer: Tokenizer) -> bool:
        """Whether pieces and whole come out alike for a text in which many cuts meet many kinds of characters."""
        cuts = sorted(self._cuts)
        text = "".join(
            before + cut + after
            for cut in cuts[:: max(1, len(cuts) // MAX_TRIED_CUTS)]
            for before, after in zip(TRIAL_TEXTS, TRIAL_TEXTS[3:] + TRIAL_TEXTS[:3], strict=True)
        )
        pieces = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in self.split(text, min_chars=1)]
        return tokenizer.encode(text, add_special_tokens=False).ids == list(itertools.chain.from_iterable(pieces))

    def _places(self, text: str) -> Iterator[int]:
        """Where `text` may be cut, in order."""
        cuts, end = self._cuts, 0
        for match in self._find.finditer(text):
            if self._find_between is not None:
                yield from (m.start() for m in self._find_between.finditer(text, end, match.start()) if m[0] in cuts)
            if match[0] in cuts:
                yield match.start()
            end = match.end()
        if self._find_between is not None:
            yield from (m.start() for m in self._find_between.finditer(text, end) if m[0] in cuts)


def _normalizes(tokenizer: Tokenizer) -> bool:
    if tokenizer.normalizer is None:
        return False
    settings = json.loads(tokenizer.normalizer.__getstate__())
    return bool(settings != {"type": "Sequence", "normalizers": []})


def _is_cut(token: AddedToken) -> bool:
    if token.lstrip or token.single_word:
        return False
    first, last = token.content[0], token.content[-1]
    return not (first.isspace() or last.isspace() or first.isalnum() or first == "_")


def _trie_pattern(words: Iterable[str]) -> str:
    """A pattern that matches the longest of `words` at a place. Common beginnings are tried only once."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _node_pattern(root)


def _node_pattern(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        prefix += re.escape(character)
    branches = [re.escape(character) + _node_pattern(child) for character, child in node.items() if character]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
