"""A served model's text side: template, tokenizer and what makes answers readable."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edge.core.errors import Code, EdgeError
from edge.tokenizing.detokenizer import Detokenizer, make_detokenizer
from edge.tokenizing.folder import FolderError, TextFolder, read_folder
from edge.tokenizing.incremental import IncrementalTokenizer, TokenCounts, pack
from edge.tokenizing.messages import TemplateTraits
from edge.tokenizing.template import ChatTemplate
from edge.tokenizing.tool_calls import MARKERS, ToolCallParser, ToolFormat, detect_format, make_parser
from edge.tokenizing.vocabulary import Vocabulary

CACHE_BYTES = 256_000_000
MAX_THREADS = 2
"""Of a model; each holds the interpreter for a moment after every batch, so more would delay the event loop."""
NO_SCOPE = b""
INLINE_MESSAGES = 1_000
"""Conversations up to this long are rendered on the event loop (about 3 ms)."""
RENDERED_CHARS = 12
"""What takes as long to tokenize as a message to render."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class TextModel:
    """Built once per served model; for use on the event loop's thread. `close` ends its threads.

    `scope` keeps callers apart: prompts of one scope are never found by another, not even by how long they take.
    Every prompt comes back as packed little-endian uint32 ids.
    """

    def __init__(self, folder: TextFolder, *, cache_bytes: int = CACHE_BYTES, threads: int | None = None) -> None:
        self.tokenizer: Tokenizer = folder.tokenizer
        self.vocabulary = Vocabulary(folder.tokenizer)
        self.eos_token_ids = folder.eos_token_ids
        self.generation_defaults = folder.generation_defaults
        self._chat = _Chat.of(folder.chat_templates, "default", folder.special_tokens)
        self._tool_chat = self._chat
        if "tool_use" in folder.chat_templates:
            self._tool_chat = _Chat.of(folder.chat_templates, "tool_use", folder.special_tokens)
        self.supports_tools = self._tool_chat is not None and self._tool_chat.traits.supports_tools
        self.tool_format: ToolFormat | None = None
        if self.supports_tools and self._tool_chat is not None:
            self.tool_format = detect_format(self._tool_chat.template.source)
        self._tool_markers = self.vocabulary.ids_of(MARKERS[self.tool_format]) if self.tool_format else frozenset()
        self._text_ends = _text_ends(folder.tokenizer)
        threads = threads or max(1, min(MAX_THREADS, (os.cpu_count() or 2) - 1))
        self._incremental = IncrementalTokenizer(folder.tokenizer, cache_bytes=cache_bytes, threads=threads)

    @classmethod
    def load(cls, folder: Path, *, cache_bytes: int = CACHE_BYTES, threads: int | None = None) -> TextModel:
        """The text side of a Hugging Face folder. Raises FolderError, which says what lacks."""
        return cls(read_folder(folder), cache_bytes=cache_bytes, threads=threads)

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary.size

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def counts(self) -> TokenCounts:
        """Prompt tokens reused and made since the start, for metrics."""
        return self._incremental.counts

    @property
    def cache_used_bytes(self) -> int:
        return self._incremental.cache_bytes

    def render_chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises EdgeError (INVALID) for what the template refuses, or if the model has none."""
        chat = self._tool_chat if tools else self._chat
        if chat is None:
            raise EdgeError(Code.INVALID, "This model has no chat template; use /v1/completions.", param="messages")
        shaped = chat.traits.shape(messages)
        return chat.template.render(shaped, tools, add_generation_prompt=add_generation_prompt, options=options)

    def tokenize_chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        scope: bytes,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The prompt's ids, on this thread. Raises EdgeError as `render_chat` does."""
        text = self.render_chat(messages, tools, add_generation_prompt=add_generation_prompt, options=options)
        return self._incremental.tokenize(_whole_unicode(text, "messages"), scope)

    async def tokenize_chat_async(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        scope: bytes,
        tenant: bytes = b"",
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> bytes:
        """As `tokenize_chat`, with long work done on a thread, where tenants take turns. May also raise EdgeError
        (OVERLOADED)."""
        render = partial(
            self.render_chat, messages, tools, add_generation_prompt=add_generation_prompt, options=options
        )
        if len(messages) <= INLINE_MESSAGES:
            text = render()
        else:
            chars = RENDERED_CHARS * len(messages)
            text = await self._incremental.in_thread(render, tenant=tenant, chars=chars)
        return await self._incremental.tokenize_async(_whole_unicode(text, "messages"), scope, tenant=tenant)

    def tokenize_text(self, text: str, *, scope: bytes = NO_SCOPE, add_special_tokens: bool = True) -> bytes:
        """The ids of a plain prompt, with the tokens that the tokenizer puts around one (such as BOS)."""
        before, after = self._text_ends if add_special_tokens else (b"", b"")
        return before + self._incremental.tokenize(_whole_unicode(text, "prompt"), scope) + after

    async def tokenize_text_async(
        self, text: str, *, scope: bytes = NO_SCOPE, tenant: bytes = b"", add_special_tokens: bool = True
    ) -> bytes:
        """As `tokenize_text`, with long new text tokenized on a thread, where tenants take turns. May also raise
        EdgeError (OVERLOADED)."""
        before, after = self._text_ends if add_special_tokens else (b"", b"")
        ids = await self._incremental.tokenize_async(_whole_unicode(text, "prompt"), scope, tenant=tenant)
        return before + ids + after

    def detokenizer(self, *, tools: bool = False) -> Detokenizer:
        """For one answer. `tools`: the request has tools, so special tokens that mark calls stay in the text."""
        return make_detokenizer(self.tokenizer, self.vocabulary, self._tool_markers if tools else ())

    def tool_call_parser(self, tool_names: Collection[str]) -> ToolCallParser | None:
        """For one answer to a request with these tools; None if the model writes calls in no form known here."""
        return make_parser(self.tool_format, tool_names) if self.tool_format and tool_names else None

    def close(self) -> None:
        self._incremental.close()


class _Chat:
    """A template with what was found out about it."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.traits = TemplateTraits.of(template)

    @classmethod
    def of(cls, templates: Mapping[str, str], name: str, special_tokens: Mapping[str, str]) -> _Chat | None:
        if name not in templates:
            return None
        try:
            return cls(ChatTemplate(templates[name], special_tokens))
        except ValueError as error:
            raise FolderError(f"The model folder cannot be used: {error}") from error


def _text_ends(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """What the tokenizer puts before and after a text (packed ids)."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return pack(whole[:at]), pack(whole[at + len(plain) :])
    return b"", b""


def _whole_unicode(text: str, param: str) -> str:
    """The text itself; half of a surrogate pair, which JSON can carry, is the caller's mistake."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EdgeError(
            Code.INVALID, f"{param} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}).", param=param
        ) from None
    return text
