from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tokenizers import Tokenizer

from edge.core.errors import Code, EdgeError
from edge.tokenizing.incremental import INLINE_CHARS, MAX_WAITING_CHARS, IncrementalTokenizer, pack
from edge.tokenizing.template import ChatTemplate
from tests.edge.tokenizing.samples import HERMES, MAKERS, sample

WORDS = st.sampled_from(
    [
        "the quick ",
        "<|im_end|>\n",
        "<|im_start|>",
        "<s>",
        " ",
        "\n",
        "漢字",
        "e\u0301",
        "▁",
        "dog.",
        "<tool_call>",
        "  ",
    ]
)
CONTENTS = st.lists(WORDS | st.text(max_size=4), max_size=6).map("".join)
LONG = "over a lazy dog. " * 60
"""Longer than the shortest segment, so that conversations of these have several."""


@contextmanager
def incremental(tokenizer: Tokenizer, cache_bytes: int = 1_000_000) -> Iterator[IncrementalTokenizer]:
    made = IncrementalTokenizer(tokenizer, cache_bytes=cache_bytes, threads=1)
    try:
        yield made
    finally:
        made.close()


def whole(tokenizer: Tokenizer, text: str) -> bytes:
    return pack(tokenizer.encode(text, add_special_tokens=False).ids)


class Conversation(RuleBasedStateMachine):
    """A conversation that grows, is edited, compacted and forked, against tokenizing every prompt whole."""

    tokenizer: Tokenizer

    def __init__(self) -> None:
        super().__init__()
        self.template = ChatTemplate(HERMES, {})
        self.incremental = IncrementalTokenizer(self.tokenizer, cache_bytes=12_000, threads=1)
        self.messages: list[dict[str, object]] = [{"role": "system", "content": LONG}]
        self.tools: list[dict[str, object]] | None = None

    def teardown(self) -> None:
        self.incremental.close()

    @rule(user=CONTENTS, answer=CONTENTS, long=st.booleans())
    def a_turn_is_added(self, user: str, answer: str, long: bool) -> None:
        self.messages.append({"role": "user", "content": user + LONG * long})
        self.messages.append({"role": "assistant", "content": answer + LONG})

    @rule(result=CONTENTS, argument=CONTENTS)
    def a_tool_is_called(self, result: str, argument: str) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": argument}}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": "1", "content": result + LONG})

    @rule(at=st.integers(0, 30), content=CONTENTS)
    def a_message_is_edited(self, at: int, content: str) -> None:
        message = self.messages[at % len(self.messages)]
        self.messages[at % len(self.messages)] = {**message, "content": content}

    @rule(count=st.integers(1, 4))
    def the_last_messages_are_dropped(self, count: int) -> None:
        del self.messages[max(1, len(self.messages) - count) :]

    @rule(description=CONTENTS)
    def the_tools_change(self, description: str) -> None:
        self.tools = [{"type": "function", "function": {"name": "read", "description": description}}]

    @invariant()
    def incremental_equals_whole(self) -> None:
        text = self.template.render(self.messages, self.tools)
        assert self.incremental.tokenize(text, b"tenant") == whole(self.tokenizer, text)

    @invariant()
    def the_cache_keeps_its_bound(self) -> None:
        assert self.incremental.cache_bytes <= 12_000


@pytest.mark.parametrize("kind", MAKERS)
def test_incremental_tokenizing_equals_whole_tokenizing_through_any_conversation(kind: str) -> None:
    machine = type(kind, (Conversation,), {"tokenizer": sample(kind)})

    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=12, deadline=None))


def test_a_next_turn_makes_only_the_tokens_that_are_new() -> None:
    text = "".join(f"<|im_start|>user\n{LONG}<|im_end|>\n" for _ in range(20))
    new = "<|im_start|>user\nthe quick brown fox<|im_end|>\n"
    with incremental(sample("byte_level_bpe")) as tokenizer:
        tokenizer.tokenize(text, b"a")
        made = tokenizer.counts.made
        reused = tokenizer.counts.reused

        tokenizer.tokenize(text + new, b"a")

        last_segment = len(whole(sample("byte_level_bpe"), f"<|im_start|>user\n{LONG}<|im_end|>\n" + new)) // 4
        assert 0 < tokenizer.counts.made - made <= last_segment
        assert tokenizer.counts.reused - reused > 10 * last_segment


def test_a_scope_does_not_find_what_another_scope_sent() -> None:
    with incremental(sample("byte_level_bpe")) as tokenizer:
        tokenizer.tokenize(f"<s>{LONG}<s>", b"one")
        tokenizer.tokenize(f"<s>{LONG}<s>", b"other")

        assert tokenizer.counts.reused == 0

        tokenizer.tokenize(f"<s>{LONG}<s>", b"one")

        assert tokenizer.counts.reused > 0


def test_a_text_larger_than_the_cache_is_tokenized_and_not_kept() -> None:
    with incremental(sample("byte_level_bpe"), cache_bytes=1_000) as tokenizer:
        assert tokenizer.tokenize(LONG, b"a") == whole(sample("byte_level_bpe"), LONG)
        assert tokenizer.cache_bytes == 0


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_ids_are_packed_as_little_endian_words(ids: list[int]) -> None:
    assert pack(ids) == struct.pack(f"<{len(ids)}I", *ids)


@pytest.mark.anyio
async def test_long_new_text_gives_the_same_ids_from_a_thread() -> None:
    text = "".join(f"<|im_start|>user\n{LONG}<|im_end|>\n" for _ in range(20))
    assert len(text) > INLINE_CHARS
    with incremental(sample("byte_level_bpe")) as tokenizer:
        assert await tokenizer.tokenize_async(text, b"a") == whole(sample("byte_level_bpe"), text)


@pytest.mark.anyio
async def test_the_loop_runs_on_while_long_text_is_tokenized() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    with incremental(sample("no_specials")) as tokenizer:
        ticker = asyncio.create_task(tick())
        await tokenizer.tokenize_async(LONG * 200, b"a")
        ticker.cancel()

    assert ticks > 10


@pytest.mark.anyio
async def test_a_shorter_prompt_does_not_wait_for_the_end_of_a_longer_one() -> None:
    done: list[str] = []

    async def send(name: str, text: str) -> None:
        await tokenizer.tokenize_async(text, b"a")
        done.append(name)

    with incremental(sample("byte_level_bpe")) as tokenizer:
        long = asyncio.create_task(send("long", "".join(f"<s>{at}{LONG}" for at in range(600))))
        await asyncio.sleep(0)
        await asyncio.gather(long, send("short", f"<s>short{LONG}" * 9))

    assert done == ["short", "long"]


@pytest.mark.anyio
async def test_a_cancelled_call_gives_its_place_in_the_queue_back() -> None:
    text = "".join(f"<s>{at}{LONG}" for at in range(200))
    with incremental(sample("byte_level_bpe")) as tokenizer:
        task = asyncio.create_task(tokenizer.tokenize_async(text, b"a"))
        await asyncio.sleep(0)
        assert tokenizer.waiting_chars > 0

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert task.cancelled()
        assert tokenizer.waiting_chars == 0


@pytest.mark.anyio
async def test_more_waiting_text_than_the_bound_is_refused_as_overload() -> None:
    with incremental(sample("byte_level_bpe")) as tokenizer:
        first = asyncio.create_task(tokenizer.tokenize_async(f"<s>{LONG}" * 100, b"a"))
        await asyncio.sleep(0)

        with pytest.raises(EdgeError) as caught:
            await tokenizer.tokenize_async("x" * MAX_WAITING_CHARS, b"a")

        assert caught.value.code is Code.OVERLOADED
        assert caught.value.retryable
        await first


@pytest.mark.anyio
async def test_a_tenant_that_floods_leaves_room_for_another() -> None:
    with incremental(sample("byte_level_bpe")) as tokenizer:
        tokenizer._waiting_chars[b"flooder"] = MAX_WAITING_CHARS * 4 // 5
        text = f"<s>{LONG}" * 100

        with pytest.raises(EdgeError, match="Too many long prompts"):
            await tokenizer.tokenize_async(text, b"a", tenant=b"flooder")

        assert await tokenizer.tokenize_async(text, b"a", tenant=b"quiet")
        assert tokenizer.waiting_chars == MAX_WAITING_CHARS * 4 // 5
