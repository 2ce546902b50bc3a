"""Tokenizing that costs what is new: segments seen before come from the cache."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer

from edge.core.errors import Code, EdgeError
from edge.tokenizing.cache import SegmentCache
from edge.tokenizing.segments import Segmenter
from edge.tokenizing.threads import TurnThreads
from enginelink.turns import within_share

INLINE_CHARS = 8_192
"""New text up to this long is tokenized on the event loop (about 2 ms); a thread would cost more than it saves."""
BATCH_CHARS = 32_768
MAX_WAITING_CHARS = 64_000_000
"""New text that may wait for the threads or be in them: about half a minute of work of one core."""


@dataclass(slots=True)
class TokenCounts:
    """Since the start: prompt tokens that came from the cache, and those that the tokenizer had to make."""

    reused: int = 0
    made: int = 0


class IncrementalTokenizer:
    """One tokenizer with its cache and threads. To be used from one thread, the event loop's; `close` ends the threads.

    Added tokens in the text become their ids; nothing is put before or after it.
    """

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int, threads: int) -> None:
        self._tokenizer = tokenizer
        self._segmenter = Segmenter.of(tokenizer)
        self._cache = SegmentCache(cache_bytes)
        self._threads = TurnThreads(threads)
        self._waiting_chars: Counter[bytes] = Counter()
        self.counts = TokenCounts()

    @property
    def is_exact_in_segments(self) -> bool:
        """False where every text must be tokenized whole."""
        return self._segmenter is not None

    @property
    def cache_bytes(self) -> int:
        return self._cache.used_bytes

    @property
    def waiting_chars(self) -> int:
        """New text of calls that wait for the threads."""
        return self._waiting_chars.total()

    def tokenize(self, text: str, scope: bytes) -> bytes:
        """The packed ids of `text`, on this thread whatever it costs."""
        job = self._plan(text, scope)
        return self._assemble(job, self._encode_all(job.missing))

    async def tokenize_async(self, text: str, scope: bytes, *, tenant: bytes = b"") -> bytes:
        """The packed ids of `text`; much new text goes to the threads, in batches, so that prompts take turns there,
        and tenants first of all.

        Raises EdgeError (OVERLOADED) if too much text waits already, of all or of this tenant.
        """
        job = self._plan(text, scope)
        new_chars = sum(map(len, job.missing))
        if new_chars <= INLINE_CHARS:
            return self._assemble(job, self._encode_all(job.missing))
        self._require_room(tenant, new_chars)
        made: list[bytes] = []
        self._waiting_chars[tenant] += new_chars
        try:
            for batch in _batches(job.missing):
                made += await self._threads.run(tenant, sum(map(len, batch)), partial(self._encode_all, batch))
        finally:
            self._waiting_chars[tenant] -= new_chars
            if not self._waiting_chars[tenant]:
                del self._waiting_chars[tenant]
        return self._assemble(job, made)

    async def in_thread(self, work: Callable[[], str], *, tenant: bytes, chars: int) -> str:
        """Do other long work for a prompt on the same threads, about as long as tokenizing so many `chars`."""
        return await self._threads.run(tenant, chars, work)

    def close(self) -> None:
        """Wait for the threads' current batches and end them."""
        self._threads.close()

    def _require_room(self, tenant: bytes, new_chars: int) -> None:
        """Raises EdgeError (OVERLOADED)."""
        room = MAX_WAITING_CHARS - self.waiting_chars - new_chars
        mine = self._waiting_chars[tenant]
        if self.waiting_chars and (room < 0 or (mine and not within_share(mine + new_chars, room))):
            message = "Too many long prompts wait to be tokenized."
            raise EdgeError(Code.OVERLOADED, message, retryable=True, retry_after_s=1.0)

    def _plan(self, text: str, scope: bytes) -> _Job:
        segments = [text] if self._segmenter is None else self._segmenter.split(text)
        return _Job(scope, segments, [self._cache.get(scope, segment) for segment in segments])

    def _assemble(self, job: _Job, made: list[bytes]) -> bytes:
        new = iter(made)
        parts = []
        for segment, known in zip(job.segments, job.known, strict=True):
            if known is None:
                part = next(new)
                self._cache.put(job.scope, segment, part)
                self.counts.made += len(part) // 4
            else:
                part = known
                self.counts.reused += len(part) // 4
            parts.append(part)
        return b"".join(parts)

    def _encode_all(self, segments: list[str]) -> list[bytes]:
        return [_encode(self._tokenizer, segment) for segment in segments]


@dataclass(frozen=True, slots=True)
class _Job:
    """One text: its segments, and the ids of those that the cache had."""

    scope: bytes
    segments: list[str]
    known: list[bytes | None]

    @property
    def missing(self) -> list[str]:
        return [segment for segment, ids in zip(self.segments, self.known, strict=True) if ids is None]


def _batches(segments: list[str]) -> Iterator[list[str]]:
    """The segments in order, in batches of about BATCH_CHARS; a longer segment is a batch of its own."""
    batch: list[str] = []
    chars = 0
    for segment in segments:
        if batch and chars + len(segment) > BATCH_CHARS:
            yield batch
            batch, chars = [], 0
        batch.append(segment)
        chars += len(segment)
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, segment: str) -> bytes:
    """The packed ids of a text. The batch call frees the interpreter for other threads; the plain call does not."""
    (encoding,) = tokenizer.encode_batch_fast([segment], add_special_tokens=False)
    return pack(encoding.ids)


def pack(ids: list[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
