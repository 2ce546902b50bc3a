"""Requests and conversations over the naive cache: what a rank does with a plan's acts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.worker.core.naive_cache import Block, NaiveCache, Tokens
from worker.core.config import CacheConfig
from worker.core.conversations import News

Worth = tuple[tuple[int, int, int], ...]
"""(first block, priority, duration_ms), by rising first block."""


@dataclass(slots=True)
class NaiveRequest:
    """`spare`: pages that a commit replaced and that somebody may still read."""

    key: int
    scope: bytes
    tokens: list[int]
    computed: int
    conversation: str
    commit_until: int
    worth: Worth = ()
    prefills: bool = True
    returns: bool = False
    loading: bool = False
    pinned: bool = False
    spare: int = 0


@dataclass(slots=True)
class NaiveConversation:
    parent: str | None = None
    legs: int = 0
    generating: bool = False
    last_context_step: int | None = None
    last_turn: str = ""
    last_prompt: bytes = b""
    demoted: bool = False


@dataclass(slots=True)
class NaiveReplica:
    """`children`: of each parent, in the order in which they came. `computing`: whose chunks are in this plan."""

    config: CacheConfig
    cache: NaiveCache = field(init=False)
    requests: dict[int, NaiveRequest] = field(default_factory=dict)
    conversations: dict[str, NaiveConversation] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    computing: list[int] = field(default_factory=list)
    copied_from: list[str] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.cache = NaiveCache(self.config)

    def begin(self, number: int, now_ms: int) -> None:
        self.number = number
        self.cache.begin(number, now_ms)
        computed, self.computing = self.computing, []
        for key in computed:
            self.commit(key)

    def finish(self) -> None:
        for who in self.copied_from:
            del self.cache.ends[who]
        self.copied_from = []
        self.cache.make_ahead()

    # Requests.

    def split(self, tokens: list[int] | Tokens) -> list[Tokens]:
        """Its full blocks."""
        size = self.config.tokens_per_block
        return [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]

    def admit(self, request: NaiveRequest, end: Block, part: tuple[Block, int] | None) -> None:
        """Behind the match that ends with `end`; `part`: a block of which the first tokens are copied."""
        self.requests[request.key] = request
        self.cache.hold(request.key, end)
        request.computed = self.committed(request.key) * self.config.tokens_per_block
        request.loading = not self.is_ready(request.key)
        if part is not None:
            request.computed += part[1]
            self.copied_from.append(f"part for {request.key}")
            self.cache.hold(self.copied_from[-1], part[0])

    def committed(self, key: int) -> int:
        return len(list(self.cache.ends[key].up()))

    def is_ready(self, key: int) -> bool:
        """All of its path can be read."""
        return all(block.is_readable for block in self.cache.ends[key].up())

    def num_cold(self, key: int) -> int:
        return sum(block.tier > 0 for block in self.cache.ends[key].up())

    def pages_needed(self, key: int, until: int) -> int:
        """How many more hold positions [0, until)."""
        has = self.committed(key) + self.cache.private[key] - self.requests[key].spare
        return max(0, -(-until // self.config.tokens_per_block) - has)

    def take(self, key: int, count: int) -> bool:
        if not self.cache.make_room(count):
            return False
        self.cache.private[key] += count
        return True

    def chunk(self, key: int, count: int, *, sample: bool) -> bool:
        request = self.requests[key]
        if not self.take(key, self.pages_needed(key, request.computed + count)):
            return False
        request.computed += count
        self.computing.append(key)
        if sample:
            self._prefill_ended(request)
        return True

    def arrive(self, key: int) -> None:
        request = self.requests[key]
        request.computed = len(request.tokens)
        self.commit(key)

    def commit(self, key: int) -> None:
        request = self.requests[key]
        full = min(request.computed, request.commit_until) // self.config.tokens_per_block
        first = self.committed(key)
        if full <= first:
            return
        worth = [self._worth(request, block) for block in range(first, full)]
        blocks = self.split(request.tokens)[first:full]
        unneeded = self.cache.commit(key, blocks, request.conversation, worth)
        if request.pinned:
            request.spare += unneeded
            self.cache.private[key] += unneeded

    @staticmethod
    def _worth(request: NaiveRequest, block: int) -> tuple[int, int]:
        kept = (35, 0)
        for first, priority, duration_ms in request.worth:
            if first <= block:
                kept = (priority, duration_ms)
        return kept

    def let_go(self, key: int) -> NaiveRequest:
        end = self.cache.ends[key]
        self.cache.release(key)
        self.cache.count_durations(end)
        return self.requests.pop(key)

    def release(self, key: int) -> None:
        request = self.let_go(key)
        if request.conversation:
            self._prefill_ended(request)
            self.conversations[request.conversation].legs -= 1

    def abandon(self, conversation: str) -> None:
        """A suspended request will not come back."""
        if conversation:
            self.conversations[conversation].last_context_step = self.number
            self.conversations[conversation].legs -= 1

    def shorten(self) -> list[int]:
        """Requests that lost blocks that they waited for go on from what is left; returns their keys."""
        size = self.config.tokens_per_block
        lost = [key for key in self.requests if self.requests[key].computed > 0 and self._has_lost(key)]
        for key in lost:
            assert self.requests[key].loading, "a running request lost blocks"
            self.requests[key].computed = self.committed(key) * size
        return lost

    def _has_lost(self, key: int) -> bool:
        request = self.requests[key]
        return request.loading and self.committed(key) * self.config.tokens_per_block < request.computed

    # Conversations.

    def register(self, key: int, parent: str | None, turn: str, prompt: bytes, *, is_context: bool) -> None:
        """Its conversation comes back, or is new; a proven parent replaces the one before, but makes no cycle."""
        request = self.requests[key]
        name = request.conversation
        known = self.conversations.get(name)
        is_retry = known is not None and (
            bool(turn and turn == known.last_turn) or bool(prompt and prompt == known.last_prompt)
        )
        request.returns = is_context and not is_retry
        one = self.conversations.setdefault(name, NaiveConversation())
        one.legs += 1
        one.last_turn, one.last_prompt = turn or one.last_turn, prompt or one.last_prompt
        if parent is not None and parent != one.parent and name not in self._ancestors(parent):
            if one.parent is not None:
                self.children[one.parent].remove(name)
            one.parent = parent
            self.children.setdefault(parent, []).append(name)
        if known is None or known.demoted:
            self.cache.restore(name)
            one.demoted = False

    def _ancestors(self, name: str) -> list[str]:
        """It and those above it, as far as they are known."""
        line = [name]
        while line[-1] in self.conversations and (parent := self.conversations[line[-1]].parent) is not None:
            line.append(parent)
        return line

    def _prefill_ended(self, request: NaiveRequest) -> None:
        if request.prefills and request.conversation:
            self.conversations[request.conversation].last_context_step = self.number
        request.prefills = False

    def heard(self, name: str, news: News) -> None:
        if name in self.conversations and news is not News.CLOSED:
            self.conversations[name].generating = news is News.GENERATING

    def returned(self, name: str, turn: str) -> None:
        """Another worker served this turn."""
        known = self.conversations.get(name)
        if known is not None:
            if turn and turn == known.last_turn:
                return
            known.last_turn, known.last_prompt = turn, b""
        self.demote_children(name)

    def demote_children(self, parent: str) -> None:
        """Those that are finished, with all their descendants."""
        priority = self.config.finished_subagent_priority
        assert priority is not None
        for child in list(self.children.get(parent, ())):
            group = self._descendants(child)
            members = [self.conversations[name] for name in group]
            if all(one.demoted for one in members) or not all(self._is_finished(one) for one in members):
                continue
            for name in group:
                self.cache.demote(name, self.cache.owned(self._descendants(name)), priority)
                self.conversations[name].demoted = True

    def _descendants(self, name: str) -> list[str]:
        """Deepest first, and then itself."""
        return [one for child in self.children.get(name, ()) for one in self._descendants(child)] + [name]

    def _is_finished(self, one: NaiveConversation) -> bool:
        if one.legs or one.generating:
            return False
        last = one.last_context_step
        return last is None or self.number - last >= self.config.finished_subagent_min_idle_iterations

    def legs(self) -> Counter[str]:
        return Counter({name: one.legs for name, one in self.conversations.items()})
